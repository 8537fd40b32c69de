"""Gated attention unit: one weak head of attention whose output is gated channel by channel, in place of attention and
feed-forward.

    u, v = silu(W_in x)          z = silu(W_z x)          q = a_q z + b_q          k = a_k z + b_k
    y_i  = W_out (u_i * sum over j allowed of  relu(q_i . k_j / n + bias_ij)^2  v_j)

Hua et al. 2022, "Transformer Quality in Linear Time", arXiv:2202.10447. Their n is the length of all training
sequences. A step cannot know how long a sequence will become, so n is declared, or is the number of keys that a query
sees. The laplace weights are from Ma et al. 2022, "Mega", arXiv:2209.10655.
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

BLOCK = 512  # queries at a time, so that no more than that many rows of weights are held


WEIGHTS = (*ACTIVATIONS, "softmax")


class Past(NamedTuple):
    """Keys and values of all positions so far, each in the slot of its number; the last slot takes what is not real."""

    keys: Tensor  # (batch, capacity + 1, dim)
    values: Tensor  # (batch, capacity + 1, hidden)


class Gau(Mixer[Past]):
    """Gated attention with one head. It stands alone in a layer: the gate does the work of a feed-forward.

    hidden:         channels of values and gates; None: twice the width.
    dim:            channels of the base, of queries and of keys.
    pattern:        who may look at whom. Causal in a decoder.
    position:       acts on queries, keys or scores: t5, rotary, alibi, or several by "both".
    weights:        what makes weights of scores: relu_squared, laplace or softmax (with scores / sqrt(dim)).
    length:         n above; None: the number of keys that a query sees.
    weight_dropout: of the weights, in training.
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
            raise UserError(f"pattern '{self.pattern}' is for {self.pattern.heads} heads, and there is one")
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
        room = keys.shape[1] - 1
        at = context.positions
        values, gates, (q, k) = self.unit.enter(x)
        k = self.position.key(k[:, None], at)[:, 0]
        slot = at if context.valid is None else torch.where(context.valid, at, room)
        state = Past(write(keys, slot, k), write(stored, slot, values))
        key_at = torch.arange(count, device=x.device)[None]
        see = AttentionMask(self._pattern(context), at, key_at)
        return self._look(q, gates, state.keys[:, :count], state.values[:, :count], see), state

    def forward(self, x: Tensor, context: Context) -> Tensor:
        at = context.positions[:1] if context.from_start else context.positions
        values, gates, (q, k) = self.unit.enter(x)
        k = self.position.key(k[:, None], at)[:, 0]
        padded = context.valid is not None and not self.pattern.causal
        see = AttentionMask(
            self._pattern(context), at, context.marked_positions if padded else at, context.from_start, padded
        )
        return self._look(q, gates, k, values, see)

    def _pattern(self, context: Context) -> Pattern:
        return self.pattern if context.pattern is None else self.pattern & context.pattern

    def _look(self, q: Tensor, gates: Tensor, keys: Tensor, values: Tensor, see: AttentionMask) -> Tensor:
        """q (batch, n, dim), keys (batch, m, dim), values (batch, m, hidden) -> (batch, n, width)"""
        q = self.position.query(q[:, None], see.query_at)[:, 0]
        if q.shape[1] <= BLOCK or self.weights.watched:
            return self.unit.out(gates * self._mix(q, keys, values, see))
        mixed = []
        for begin in range(0, q.shape[1], BLOCK):  # the weights of a block are made again in the backward pass
            end = begin + BLOCK
            m = end if see.from_start and see.pattern.causal else keys.shape[1]
            part_of = see._replace(query_at=see.query_at[:, begin:end], key_at=see.key_at[:, :m], from_start=False)
            block = (q[:, begin:end], keys[:, :m], values[:, :m], part_of)
            again = torch.is_grad_enabled()
            mixed.append(checkpoint(self._mix, *block, use_reentrant=False) if again else self._mix(*block))
        return self.unit.out(gates * torch.cat(mixed, 1))

    def _mix(self, q: Tensor, keys: Tensor, values: Tensor, see: AttentionMask) -> Tensor:
        scores = (q @ keys.mT)[:, None]  # (batch, 1, n, m)
        allowed = see.full_mask(1)
        if self.kind == "softmax":
            scores = scores / math.sqrt(self.dim)
        elif self.length is not None:
            scores = scores / self.length
        else:
            scores = scores / (scores.shape[-1] if allowed is None else allowed.sum(-1, keepdim=True).clamp(min=1))
        bias = self.position.bias(see.query_at[:, None, :, None], see.key_at[:, None, None, :], q[:, None])
        scores = scores if bias is None else scores + bias
        if self.kind == "softmax":
            weights = masked_softmax(scores if allowed is None else scores.masked_fill(~allowed, float("-inf")))
        else:
            weights = ACTIVATIONS[self.kind](scores)
            weights = weights if allowed is None else weights.masked_fill(~allowed, 0.0)
        return self.drop(self.weights(weights))[:, 0] @ values

    def cost(self, length: int, past: int = 0) -> Cost:
        """All pairs of the blocks that hold any that may look, whatever the pattern spares."""
        pairs = length * (past + length)
        if past == 0 and self.pattern.causal:
            ends = range(BLOCK, length + BLOCK, BLOCK)
            pairs = sum((min(end, length) - end + BLOCK) * min(end, length) for end in ends)
        each = self.dim + self.hidden
        kept = (past + length + 1) * each * self.unit.out.weight.element_size() if self.streams else 0
        return Cost(self.unit.flops * length + 2 * pairs * each, kept)

    def growth(self) -> Growth:
        return Growth("n²·d", "1", "1")

    def value_path(self) -> Iterator[Tensor]:
        yield from (self.unit.into.weight, self.unit.out.weight)
