"""The contract of passes, which change a model once it is built: other linear layers, adapters, packed weights."""

from abc import abstractmethod
from typing import Any, ClassVar

from torch import nn


class Pass:
    """Changes a model in place, in the order of a recipe's [model] passes = [...]. Parts are in regard/passes."""

    root: ClassVar[str] = "."
    folder: ClassVar[tuple[str, ...]] = ("passes",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)

    @abstractmethod
    def __call__(self, model: nn.Module) -> None: ...
