"""How a decoder that writes all tokens at once decides how many: on a canvas, a row of tokens, some of them BLANK."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from .context import Memory

BLANK = -1  # a position of a canvas without a token


class Canvases(NamedTuple):
    """Candidates for the canvas of each row, the most probable first."""

    lengths: Tensor  # (batch, candidates) positions
    logprobs: Tensor  # (batch, candidates)
    copies: Tensor | None = None  # (batch, candidates, source) how many positions are copies of each source position


class Length(nn.Module):
    """Decides the number of positions of a canvas from the encoder's output.

    is_exact: the canvas has as many positions as the target with its end token. Otherwise the target is found in it.
    """

    folder: ClassVar[tuple[str, ...]] = ("lengths",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    is_exact: bool = True

    def candidates(self, memory: Memory, count: int) -> Canvases:
        """Return the `count` most probable canvases of every row, or fewer where there are no more."""
        raise NotImplementedError

    def fits(self, sources: Tensor, needed: Tensor) -> Tensor:
        """Return for pairs (pairs,) whether a canvas can have as many positions as needed. sources: their lengths. If
        not, `remedy(sources, needed)` is the setting with which they would fit, such as model.length.ratio=2.5."""
        return torch.ones_like(needed, dtype=torch.bool)

    def most(self, sources: Tensor) -> Tensor:
        """Return the most positions that a canvas gets. sources: lengths of the sources."""
        return 2 * sources + 20

    def loss(self, memory: Memory, lengths: Tensor, copies: Tensor | None) -> Tensor | None:
        """Return the loss (batch,) of the true lengths (batch,) or copies (batch, source); None: nothing to learn."""
        return None


def source_lengths(memory: Memory) -> Tensor:
    """Return the number of real source positions of every row, (batch,)."""
    batch, time = memory.x.shape[:2]
    return torch.full((batch,), time, device=memory.x.device) if memory.valid is None else memory.valid.sum(1)
