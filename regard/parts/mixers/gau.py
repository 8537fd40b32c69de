"""Gated attention unit: one head of attention whose output is gated channel by channel, in place of attention and
feed-forward.

    u, v = silu(W_in x)          z = silu(W_z x)          q = a_q z + b_q          k = a_k z + b_k
    y_i  = W_out (u_i * sum over j allowed of  relu(q_i . k_j / n + bias_ij)^2  v_j)

Hua et al. 2022, "Transformer Quality in Linear Time", arXiv:2202.10447. Their n is the length of all training
sequences. A step cannot know how long a sequence will become, so n is declared, or is the number of keys that a query
attends to. The laplace weights are from Ma et al. 2022, "Mega", arXiv:2209.10655.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.bases import AttentionMask
from regard.bases.cache import grow_slots, write
from regard.bases.gated import ACTIVATIONS, Unit, position_for
from regard.core import Context, Cost, Dropout, Growth, Mixer, Pattern, Place, Position, Tap, UserError, part
from regard.errors import nearest
from regard.ops.attention import masked_softmax

QUERY_BLOCK = 512  # queries at a time, which bounds the memory of the weights


WEIGHTS = (*ACTIVATIONS, "softmax")


class Past(NamedTuple):
    """Keys and values of all positions so far, by position; the last slot is for padding."""

    keys: Tensor  # (batch, capacity + 1, dim)
    values: Tensor  # (batch, capacity + 1, hidden)


class Gau(Mixer[Past]):
    """Gated attention with one head. It replaces both attention and feed-forward in a layer.

    hidden:         channels of values and gates; None: twice the width.
    dim:            channels of the shared base, of queries and of keys.
    pattern:        which keys each query may attend to; causal in a decoder.
    position:       position that acts on queries, keys or scores: t5, rotary, alibi, or several by "both".
    weights:        what turns scores into weights: relu_squared, laplace or softmax (with scores / sqrt(dim)).
    length:         n above; None: the number of keys that a query attends to.
    weight_dropout: dropout on the weights.
    """

    examples = (
        {"dim": 8},
        {"dim": 6, "hidden": 10, "length": 16, "position": "rotary", "bias": False},
        {"dim": 8, "weights": "softmax", "pattern": "causal & window(4)"},
        {"dim": 8, "weights": "laplace", "pattern": "everything", "position": {"part": "t5", "buckets": 8}},
        {"dim": 8, "pattern": "everything", "length": 13, "position": {"part": "both", "one": "rotary", "two": "t5"}},
    )

    def __init__(
        self,
        width: int,
        hidden: int | None = None,
        dim: int = 128,
        pattern: Pattern | str = "causal",
        position: Position | str | dict = "t5",
        weights: str = "relu_squared",
        length: int | None = None,
        bias: bool = True,
        weight_dropout: float = 0.0,
        place: Place | None = None,
    ):
        super().__init__()
        if weights not in WEIGHTS:
            raise UserError(f"unknown weights '{weights}'{nearest(weights, WEIGHTS)}")
        if length is not None and length < 1:
            raise UserError(f"length must be at least 1, not {length}")
        self.width, self.hidden, self.dim, self.length = width, hidden or 2 * width, dim, length
        self.pattern = part(Pattern, pattern)
        if self.pattern.heads > 1:
            raise UserError(f"pattern '{self.pattern}' is for {self.pattern.heads} heads, and gau has one")
        self.position = position_for(position, place, width, dim)
        self.kind = weights
        self.unit = Unit(width, self.hidden, dim, 2, bias)
        self.weights = Tap()
        self.drop = Dropout(weight_dropout)

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return self.pattern.causal

    def start(self, context: Context, capacity: int) -> Past:
        batch, like = context.positions.shape[0], self.unit.out.weight
        return Past(*(like.new_zeros(batch, capacity + 1, channels) for channels in (self.dim, self.hidden)))

    def step(self, x: Tensor, state: Past, context: Context) -> tuple[Tensor, Past]:
        if not self.streams:
            raise UserError(f"pattern '{self.pattern}' looks ahead, so this unit does not step")
        count = context.last_position + 1
        keys, stored = grow_slots(state.keys, count), grow_slots(state.values, count)
        last_slot = keys.shape[1] - 1
        at = context.positions
        values, gates, (q, k) = self.unit.enter(x)
        k = self.position.key(k[:, None], at)[:, 0]
        slot = at if context.valid is None else torch.where(context.valid, at, last_slot)
        state = Past(write(keys, slot, k), write(stored, slot, values))
        key_at = torch.arange(count, device=x.device)[None]
        mask = AttentionMask(self._pattern(context), at, key_at)
        return self._attend(q, gates, state.keys[:, :count], state.values[:, :count], mask), state

    def forward(self, x: Tensor, context: Context) -> Tensor:
        at = context.positions[:1] if context.from_start else context.positions
        values, gates, (q, k) = self.unit.enter(x)
        k = self.position.key(k[:, None], at)[:, 0]
        padded = context.valid is not None and not self.pattern.causal
        mask = AttentionMask(
            self._pattern(context), at, context.marked_positions if padded else at, context.from_start, padded
        )
        return self._attend(q, gates, k, values, mask)

    def _pattern(self, context: Context) -> Pattern:
        return self.pattern if context.pattern is None else self.pattern & context.pattern

    def _attend(self, q: Tensor, gates: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask) -> Tensor:
        """Return (batch, n, width) from q (batch, n, dim), keys (batch, m, dim) and values (batch, m, hidden)."""
        q = self.position.query(q[:, None], mask.query_at)[:, 0]
        if q.shape[1] <= QUERY_BLOCK or self.weights.watched:
            return self.unit.out(gates * self._mix(q, keys, values, mask))
        mixed = []
        for begin in range(0, q.shape[1], QUERY_BLOCK):  # the backward pass recomputes the weights of a block
            end = begin + QUERY_BLOCK
            m = end if mask.from_start and mask.pattern.causal else keys.shape[1]
            block_mask = mask._replace(
                query_at=mask.query_at[:, begin:end], key_at=mask.key_at[:, :m], from_start=False
            )
            block = (q[:, begin:end], keys[:, :m], values[:, :m], block_mask)
            recompute = torch.is_grad_enabled()
            mixed.append(checkpoint(self._mix, *block, use_reentrant=False) if recompute else self._mix(*block))
        return self.unit.out(gates * torch.cat(mixed, 1))

    def _mix(self, q: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask) -> Tensor:
        scores = (q @ keys.mT)[:, None]  # (batch, 1, n, m)
        allowed = mask.full_mask(1)
        if self.kind == "softmax":
            scores = scores / math.sqrt(self.dim)
        elif self.length is not None:
            scores = scores / self.length
        else:
            scores = scores / (scores.shape[-1] if allowed is None else allowed.sum(-1, keepdim=True).clamp(min=1))
        bias = self.position.bias(mask.query_at[:, None, :, None], mask.key_at[:, None, None, :], q[:, None])
        scores = scores if bias is None else scores + bias
        if self.kind == "softmax":
            weights = masked_softmax(scores if allowed is None else scores.masked_fill(~allowed, float("-inf")))
        else:
            weights = ACTIVATIONS[self.kind](scores)
            weights = weights if allowed is None else weights.masked_fill(~allowed, 0.0)
        return self.drop(self.weights(weights))[:, 0] @ values

    def cost(self, length: int, past: int = 0) -> Cost:
        """Count all pairs of the computed blocks, whatever the pattern masks."""
        pairs = length * (past + length)
        if past == 0 and self.pattern.causal:
            ends = range(QUERY_BLOCK, length + QUERY_BLOCK, QUERY_BLOCK)
            pairs = sum((min(end, length) - end + QUERY_BLOCK) * min(end, length) for end in ends)
        each = self.dim + self.hidden
        kept = (past + length + 1) * each * self.unit.out.weight.element_size() if self.streams else 0
        return Cost(self.unit.flops * length + 2 * pairs * each, kept)

    def growth(self) -> Growth:
        return Growth("n²·d", "1", "1")

    def value_path(self) -> Iterator[Tensor]:
        yield from (self.unit.into.weight, self.unit.out.weight)
