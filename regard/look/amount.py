"""Human-readable large numbers."""


def format_count(number: int | None) -> str:
    """Format a number with a metric prefix: 1234567 -> 1.23 M."""
    if number is None:
        return "—"
    for size, letter in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}" if number < 999.5 * size else f"{number / size:,.0f} {letter}"
    return str(number)
