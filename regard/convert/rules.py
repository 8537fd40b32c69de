"""The rules in which a family is written down: pairs of config.json entries and recipe entries, and pairs of checkpoint
tensors and model tensors, each written once and used in both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Split = Callable[[Tensor], Sequence[Tensor]]
Join = Callable[[Sequence[Tensor]], Tensor]

ACTIVATIONS = {  # Hugging Face's name -> ours
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "relu": "relu", "silu": "silu", "swish": "silu", "tanh": "tanh", "quick_gelu": "gelu_quick",
}  # fmt: skip


def number(value: Any) -> float | None:
    """Return a float; None leaves the entry to the recipe."""
    return None if value is None else float(value)


@dataclass(frozen=True)
class Key:
    """An entry of config.json and the recipe entries that correspond to it.

    theirs: dotted where tables are nested, such as "vision_config.hidden_size".
    ours:   dotted as in an override, such as "model.layer.0.feedforward.hidden"; several entries take the same value.
    names:  their value -> ours, where the names differ; of several that map to one of ours, the first is exported.
    into:   a function from their value to ours, instead of names.
    back:   its inverse.
    """

    theirs: str
    ours: str | tuple[str, ...]
    names: dict[Any, Any] | None = None
    into: Callable[[Any], Any] = lambda value: value
    back: Callable[[Any], Any] = lambda value: value

    @property
    def places(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours


@dataclass(frozen=True)
class Rule:
    """One tensor of theirs and the one or several tensors of ours that it holds. split and join are exact inverses, and
    linear, so that gradients can go through them, too."""

    ours: tuple[str, ...]
    theirs: str
    split: Split
    join: Join


def same(ours: str, theirs: str) -> Rule:
    return Rule((ours,), theirs, lambda t: [t], lambda ts: ts[0])


def transposed(ours: str, theirs: str) -> Rule:
    """Return the rule for a matrix that they store as (in, out)."""
    return Rule((ours,), theirs, lambda t: [t.mT], lambda ts: ts[0].mT)


def reshaped(ours: str, theirs: str, our_shape: Sequence[int], their_shape: Sequence[int]) -> Rule:
    return Rule((ours,), theirs, lambda t: [t.reshape(*our_shape)], lambda ts: ts[0].reshape(*their_shape))


def weight_and_bias(
    ours: str, theirs: str, rule: Callable[[str, str], Rule] = same, bias: bool = True
) -> Iterator[Rule]:
    """Yield a weight by a rule, and its bias unchanged."""
    yield rule(f"{ours}.weight", f"{theirs}.weight")
    if bias:
        yield same(f"{ours}.bias", f"{theirs}.bias")


def fused(ours: Sequence[str], theirs: str, sizes: Sequence[int] | None = None, transpose: bool = False) -> Rule:
    """Return the rule for several linear layers that they concatenate along the outputs.

    sizes:     outputs of each; None: all equal.
    transpose: they store matrices as (in, out).
    """

    def split(t: Tensor) -> Sequence[Tensor]:
        t = t.mT if transpose else t
        return t.split(list(sizes) if sizes else t.shape[0] // len(ours))

    def join(ts: Sequence[Tensor]) -> Tensor:
        joined = torch.cat(list(ts))
        return joined.mT if transpose else joined

    return Rule(tuple(ours), theirs, split, join)


def interleaved(ours: Sequence[str], theirs: str, heads: int) -> Rule:
    """Return the rule for several linear layers interleaved by heads: the first head of each, then the second, ..."""

    def split(t: Tensor) -> Sequence[Tensor]:
        return [part.flatten(0, 1) for part in t.unflatten(0, (heads, len(ours), -1)).unbind(1)]

    def join(ts: Sequence[Tensor]) -> Tensor:
        return torch.stack([t.unflatten(0, (heads, -1)) for t in ts], 1).flatten(0, 2)

    return Rule(tuple(ours), theirs, split, join)


def projections(branch: str, kind: str, which: str = "qkv") -> list[str]:
    """Return the names of an attention's projections: projections("stack.layers.0.branches.mixer", "weight")."""
    return [f"{branch}.{letter}.{kind}" for letter in which]
