"""Replace submodules of a model, as quantization and adapters do."""

from collections.abc import Callable

from torch import nn


def replace_modules(model: nn.Module, change: Callable[[str, nn.Module], nn.Module | None]) -> int:
    """Replace every submodule by `change(path, module)` unless that is None, and return the number replaced. A module
    that occurs several times is replaced by one new module."""
    made: dict[nn.Module, nn.Module | None] = {}
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if child not in made:
                made[child] = change(f"{path}.{name}".lstrip("."), child)
            new = made[child]
            if new is not None:
                setattr(parent, name, new)
    return sum(new is not None for new in made.values())
