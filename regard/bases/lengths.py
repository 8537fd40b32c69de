"""What the parts share that decide how many tokens a parallel decoder writes."""

from regard.core import UserError


def check_classifier(classes: int, weight: float) -> None:
    """Refuse impossible sizes of a classifier of lengths, and weights of its loss."""
    if not 2 <= classes <= 10_000 or not 0 <= weight <= 1000:
        raise UserError(f"classes must be from 2 to 10,000, and weight from 0 to 1,000, not {classes} and {weight:g}")
