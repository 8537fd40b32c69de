"""The contract of what turns a batch's input into vectors."""

from typing import Any, ClassVar

from torch import Tensor, nn

from .context import Context
from .position import Position


class Embed(nn.Module):
    """Whatever the input is -> (batch, time, width).

    position: acts on the vectors made here.
    table:    the matrix (vocab, width) that a tied head or another embed may share, None when there is none.
    """

    folder: ClassVar[tuple[str, ...]] = ("embeds",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    position: Position
    table: nn.Parameter | None

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        raise NotImplementedError

    def share(self, table: nn.Parameter) -> None:
        """Use this table instead of the own one."""
        raise NotImplementedError
