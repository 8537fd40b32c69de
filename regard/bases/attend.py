"""Softmax attention as a module, which chooses the kernel for each call unless one is given.

out = softmax(q k^T + bias, over the keys that the pattern allows) v
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.core import Position, Score, Tap, UserError
from regard.ops.dispatch import note

from . import blocks, dense, flex, reference
from .attention_mask import AttentionMask

KERNELS = ("auto", "reference", "sdpa", "blocks", "flex")


class Attend(nn.Module):
    """q (batch, heads, n, dim), k and v (batch, kv_heads, m, dim) -> (batch, heads, n, dim).

    kernel:  reference  explicit weights, for taps, odd scores and tests
             sdpa       torch's fused kernel
             blocks     only the keys that a block of queries may see
             flex       torch's flex_attention, compiled when first wanted: CUDA, and CPU without gradients
             auto       sdpa, or blocks where that is faster
    dropout: of attention weights, in training.
    """

    def __init__(self, kernel: str = "auto", dropout: float = 0.0):
        super().__init__()
        if kernel not in KERNELS:
            raise UserError(f"unknown kernel '{kernel}' (known: {', '.join(KERNELS)})")
        if not 0 <= dropout < 1:
            raise UserError(f"dropout of attention weights must be at least 0 and below 1, not {dropout}")
        self.kernel, self.dropout = kernel, dropout
        self.weights = Tap()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        score: Score,
        position: Position,
        plain: Tensor | None = None,
    ) -> Tensor:
        """q and k are the outputs of `score` and `position`; `plain` is the query for biases that need one."""
        drop = self.dropout if self.training else 0.0
        kernel = self.choose(q, k, mask, score, position, drop)
        plain = q if plain is None else plain
        if kernel == "reference":
            return reference.attend(q, k, v, mask, score, position, plain, drop, self.weights)
        if kernel != "sdpa" and torch.is_autocast_enabled(
            q.device.type
        ):  # autocast does not convert the inputs of our own kernels
            q, k, v = (t.to(torch.get_autocast_dtype(q.device.type)) for t in (q, k, v))
        how = {"sdpa": dense, "blocks": blocks, "flex": flex}[kernel]
        return how.attend(q, k, v, mask, position, plain, drop)

    @property
    def is_default(self) -> bool:
        """Whether the tap is not watched and no other kernel than sdpa was chosen."""
        return self.kernel in ("auto", "sdpa") and not self._modules["weights"].watchers  # type: ignore[union-attr]

    def choose(self, q: Tensor, k: Tensor, mask: AttentionMask, score: Score, position: Position, drop: float) -> str:
        """Return the kernel for this call. A watched tap, a score that is not a dot product and a position with an
        output bias need explicit weights, whatever kernel was given; steps after the first use sdpa."""
        if why := self._why_explicit(score, position):
            note("attention", why)
            return "reference"
        if mask.row_owner is not None:
            return "sdpa"
        if self.kernel == "sdpa":
            return "sdpa"
        if self.kernel == "auto":
            if not blocks.is_faster(q.shape[2], q.device, mask, position, drop):
                return "sdpa"
            note("attention", "the pattern leaves so much out that torch is faster block by block")
            return "blocks"
        if self.kernel != "reference" and not {"blocks": blocks, "flex": flex}[self.kernel].supports(mask):
            return "sdpa"
        note("attention", f"kernel = '{self.kernel}' was chosen")
        return self.kernel

    def _why_explicit(self, score: Score, position: Position) -> str:
        """Return why explicit weights are needed; an empty string where they are not."""
        if self.weights.watched:
            return "its weights are watched"
        if not score.is_dot:
            return "its score is not a dot product"
        return "its position has an output bias" if position.acts("output_bias") else ""
