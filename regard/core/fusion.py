"""What parts declare of themselves so that decode/session.py can take a step of one position by one call of a kernel.

This is data: modules, numbers, and for attention what a step reads and writes. A part that declares nothing is stepped
through by its own `step`, and the output is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from torch import Tensor, nn

from .context import Context


class RotaryTables(NamedTuple):
    """How pairs of channels of queries and keys are rotated. halves: channel i with i + dim/2, else with i + 1."""

    cos: Tensor  # (rows or 1, pairs)
    sin: Tensor
    halves: bool


class FusedNorm(NamedTuple):
    """weight * (x - mean(x) if centered) / sqrt(variance or mean square + eps) + bias, over the channels."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    centered: bool


class FusedMlp(NamedTuple):
    """last(activation(first(x))), or last(activation(first(x)) * gated(x))."""

    first: nn.Module
    last: nn.Module
    activation: str
    gated: nn.Module | None = None


class AttentionStep(NamedTuple):
    """What the attention at one new position of every row reads and writes."""

    state: Any  # after the step
    keys: Tensor  # (stored rows, slots, kv_heads, dim)
    values: Tensor
    slot: int | None  # where the new keys and values go; None: there are none
    key_count: int  # of slots that are looked at, the first ones
    added: Tensor | None  # to logits, or a bool mask
    row_owner: Tensor | None  # (batch, slots) the stored row that holds each slot; None: the own
    queries: int = 1  # rows that look at one stored row
    rotary: RotaryTables | None = None
    constant: bool = False  # as long as the state is this very one, every step is the same


class FusedAttention(NamedTuple):
    """out(softmax(scale q(x) keys^T + added) values). k and v are None where keys and values are not of x.

    step:   what a step from a state reads and writes; None where this step cannot be fused.
    follow: the same for another layer, given the step and the state of a layer of the same group; None where their
            states differ in more than keys and values.
    group:  equal for attentions that look at the same places.
    """

    q: nn.Module
    k: nn.Module | None
    v: nn.Module | None
    out: nn.Module
    scale: float
    step: Callable[[Tensor, Any, Context], AttentionStep | None]
    follow: Callable[[AttentionStep, Any, Any], AttentionStep | None]
    group: Hashable
