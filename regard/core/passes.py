"""The contract of what changes a model once it is built: other linear maps, added small ones, packed weights."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn


class Pass:
    """Applied in place, in the order of a recipe's [model] passes = [...]. Parts stand in regard/passes."""

    root: ClassVar[str] = "."
    folder: ClassVar[tuple[str, ...]] = ("passes",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)

    @abstractmethod
    def __call__(self, model: nn.Module) -> None: ...


def exchange(model: nn.Module, change: Callable[[str, nn.Module], nn.Module | None]) -> int:
    """Put what `change` makes of a module, given its path, in its place, wherever it stands; one that stands in several
    places stays one. How many were changed."""
    made: dict[nn.Module, nn.Module | None] = {}
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if child not in made:
                made[child] = change(f"{path}.{name}".lstrip("."), child)
            new = made[child]
            if new is not None:
                setattr(parent, name, new)
    return sum(new is not None for new in made.values())
