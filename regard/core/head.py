"""The contract of what turns the last vectors into scores."""

from typing import Any, ClassVar

from torch import Tensor, nn

from .context import Context


class Head(nn.Module):
    """x (batch, time, width) -> scores.

    tied:  wants the embedding's table as its own weight; given by `share`.
    pools: one answer per sequence instead of one per position; such a model does not step.
    """

    folder: ClassVar[tuple[str, ...]] = ("heads",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    tied: bool = False
    pools: bool = False

    def forward(self, x: Tensor, context: Context) -> Tensor:
        raise NotImplementedError

    def share(self, table: nn.Parameter) -> None:
        raise NotImplementedError

    def flops(self, length: int) -> int:
        """Of matrix products for `length` positions."""
        raise NotImplementedError
