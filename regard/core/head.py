"""The contract of what turns the last vectors into logits."""

from typing import Any, ClassVar

from torch import Tensor, nn

from regard.errors import UserError
from regard.schema import name_of

from .context import Context
from .embed import Embed


class Head(nn.Module):
    """x (batch, time, width) -> scores.

    pools:   one answer per sequence instead of one per position; such a model does not step.
    streams: False when an answer may depend on what comes later; nor does such a model.
    """

    folder: ClassVar[tuple[str, ...]] = ("heads",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    pools: bool = False
    streams: bool = True

    def forward(self, x: Tensor, context: Context) -> Tensor:
        raise NotImplementedError

    def linear(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Vectors, table (classes, width) and bias (classes,) where the scores are vectors table^T + bias: a loss can
        then be made without ever holding all scores. None where they are not."""
        return None

    def log_p(self, x: Tensor, context: Context, targets: Tensor) -> Tensor | None:
        """Of the tokens `targets` (batch, time), those below 0 left out, where that is less work than the scores of all
        tokens; None where it is not."""
        return None

    def tie(self, embed: Embed) -> None:
        """Use the weights of an embed that has a table."""
        assert embed.table is not None
        self.share(embed.table)

    def share(self, table: nn.Parameter) -> None:
        """Use an embedding's table as the own weight; only heads over a vocabulary can."""
        raise UserError(f"head '{name_of(self)}' has no table, so it cannot be tied to the embedding")

    def flops(self, length: int) -> int:
        """Of matrix products for `length` positions."""
        raise NotImplementedError
