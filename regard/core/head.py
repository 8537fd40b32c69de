"""The contract of heads, which turn the last hidden vectors into logits."""

from typing import Any, ClassVar

from torch import Tensor, nn

from regard.errors import UserError
from regard.schema import name_of

from .context import Context
from .embed import Embed


class Head(nn.Module):
    """x (batch, time, width) -> logits.

    pools:   it gives one output per sequence instead of one per position; such a model does not step.
    streams: False when an output may depend on later positions; such a model does not step either.
    """

    folder: ClassVar[tuple[str, ...]] = ("heads",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    pools: bool = False
    streams: bool = True

    def forward(self, x: Tensor, context: Context) -> Tensor:
        raise NotImplementedError

    def linear(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Return vectors, table (classes, width) and bias (classes,) where the logits are vectors table^T + bias, so
        that a loss need not hold all logits; None where they are not."""
        return None

    def target_logprobs(self, x: Tensor, context: Context, targets: Tensor) -> Tensor | None:
        """Return the log-probabilities of `targets` (batch, time), those below 0 left out, where that is less work than
        the logits of all tokens; None where it is not."""
        return None

    def tie(self, embed: Embed) -> None:
        """Share the weights of an embed that has a table."""
        assert embed.table is not None
        self.share(embed.table)

    def share(self, table: nn.Parameter) -> None:
        """Use an embedding's table as the weight; only heads over a vocabulary can."""
        raise UserError(f"head '{name_of(self)}' has no table, so it cannot be tied to the embedding")

    def flops(self, length: int) -> int:
        """Return the flops of matrix products for `length` positions."""
        raise NotImplementedError
