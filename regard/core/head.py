"""The contract of what turns the last vectors into scores, and the ways to make one vector of a sequence."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.errors import UserError, nearest
from regard.schema import name_of

from .context import Context
from .embed import Embed

POOLS = ("first", "last", "mean", "max")


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


def check_pool(how: str) -> str:
    if how not in POOLS:
        raise UserError(f"unknown pool '{how}'{nearest(how, POOLS)}")
    return how


def pool(x: Tensor, context: Context, how: str) -> Tensor:
    """x (batch, time, width) -> (batch, width), from the real positions alone. A row without any gives something
    finite that means nothing."""
    if how == "first":
        return x[:, 0]
    if how == "last":
        rows = torch.arange(x.shape[0], device=x.device)
        return x[rows, (context.lengths - 1).clamp(min=0)]
    if context.valid is None:
        return x.mean(1) if how == "mean" else x.amax(1)
    real = context.valid[..., None]
    if how == "mean":
        return x.masked_fill(~real, 0.0).sum(1) / context.lengths.clamp(min=1)[:, None]
    most = x.masked_fill(~real, float("-inf")).amax(1)
    return torch.where(context.lengths[:, None] > 0, most, 0.0)
