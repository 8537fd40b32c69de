"""Descriptions that parts give of themselves, from which decode/session.py compiles a step into one kernel call.

They hold modules, numbers and, for attention, the tensors that a step reads and writes. A part without a description
is stepped by its own `step`, with the same output.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from torch import Tensor, nn

from .context import Context


class RotaryTables(NamedTuple):
    """How pairs of query and key channels are rotated. halves: channel i pairs with i + dim/2, otherwise with i + 1."""

    cos: Tensor  # (rows or 1, pairs)
    sin: Tensor
    halves: bool


class FusedNorm(NamedTuple):
    """weight * (x - mean(x) if centered) / sqrt(variance or mean square + eps) + bias, over the channels."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centered: bool


class FusedEmbed(NamedTuple):
    """scale * table[token], to which `position.embed` adds a vector for every position."""

    table: Tensor
    scale: float
    position: nn.Module


class FusedMlp(NamedTuple):
    """last(activation(first(x))), or last(activation(first(x)) * gated(x))."""

    first: nn.Module
    last: nn.Module
    activation: str
    gated: nn.Module | None = None


class AttentionStep(NamedTuple):
    """The tensors that attention reads and writes at one new position of every row."""

    state: Any  # after the step
    keys: Tensor  # (stored rows, slots, kv_heads, dim)
    values: Tensor
    slot: int | None  # of the new keys and values; None: there are none
    key_count: int  # the first so many slots are attended to
    attn_mask: Tensor | None  # bool, or a float that is added to the logits
    row_owner: Tensor | None  # (batch, slots) the stored row that holds each slot; None: its own row
    queries: int = 1  # batch rows that attend to one stored row
    rotary: RotaryTables | None = None
    constant: bool = False  # every step is the same while the state is this very object
    sequential: bool = False  # the next steps write into the next slots, and attend to all slots up to there


class FusedAttention(NamedTuple):
    """out(softmax(scale q(x) keys^T + attn_mask) values). k and v are None where keys and values do not come from x.

    step:   returns the AttentionStep from a state; None where this step cannot be fused.
    follow: returns the same for another layer, given the step and the state of a layer of the same group; None where
            their states differ in more than keys and values.
    group:  equal for attentions that attend to the same positions.
    """

    q: nn.Module
    k: nn.Module | None
    v: nn.Module | None
    out: nn.Module
    scale: float
    step: Callable[[Tensor, Any, Context], AttentionStep | None]
    follow: Callable[[AttentionStep, Any, Any], AttentionStep | None]
    group: Hashable
