"""The vocabulary in which a family of models is written down: entries of config.json and of the recipe, tensors of the
checkpoint and of the model, each pair said once and read in both directions."""

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
    """A number with a fraction; a null leaves it to the recipe."""
    return None if value is None else float(value)


@dataclass(frozen=True)
class Key:
    """An entry of config.json and where it stands in the recipe.

    theirs: dotted where tables are nested: "vision_config.hidden_size".
    ours:   dotted as in an override, "model.layer.0.feedforward.hidden"; several entries take the same value.
    names:  their value -> ours, where they are called otherwise; two of theirs may be one of ours, and the first goes
            back.
    into, back: functions instead of that.
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
    """One tensor of theirs is one or several of ours. split and join are each other's inverse, bit by bit, and linear:
    gradients go through them, too."""

    ours: tuple[str, ...]
    theirs: str
    split: Split
    join: Join


def same(ours: str, theirs: str) -> Rule:
    return Rule((ours,), theirs, lambda t: [t], lambda ts: ts[0])


def turned(ours: str, theirs: str) -> Rule:
    """A matrix that they keep as (in, out)."""
    return Rule((ours,), theirs, lambda t: [t.mT], lambda ts: ts[0].mT)


def shaped(ours: str, theirs: str, inside: Sequence[int], outside: Sequence[int]) -> Rule:
    """The same numbers in another shape: `inside` is ours, `outside` theirs."""
    return Rule((ours,), theirs, lambda t: [t.reshape(*inside)], lambda ts: ts[0].reshape(*outside))


def both(ours: str, theirs: str, rule: Callable[[str, str], Rule] = same, bias: bool = True) -> Iterator[Rule]:
    """A weight by a rule, and its bias as it is."""
    yield rule(f"{ours}.weight", f"{theirs}.weight")
    if bias:
        yield same(f"{ours}.bias", f"{theirs}.bias")


def fused(ours: Sequence[str], theirs: str, sizes: Sequence[int] | None = None, turn: bool = False) -> Rule:
    """Several maps side by side in one, along their outputs. sizes: of the outputs; None: all the same. turn: they keep
    matrices as (in, out)."""

    def split(t: Tensor) -> Sequence[Tensor]:
        t = t.mT if turn else t
        return t.split(list(sizes) if sizes else t.shape[0] // len(ours))

    def join(ts: Sequence[Tensor]) -> Tensor:
        whole = torch.cat(list(ts))
        return whole.mT if turn else whole

    return Rule(tuple(ours), theirs, split, join)


def interleaved(ours: Sequence[str], theirs: str, heads: int) -> Rule:
    """Several maps in one, head by head: the first head of each, then the second of each, ..."""

    def split(t: Tensor) -> Sequence[Tensor]:
        return [part.flatten(0, 1) for part in t.unflatten(0, (heads, len(ours), -1)).unbind(1)]

    def join(ts: Sequence[Tensor]) -> Tensor:
        return torch.stack([t.unflatten(0, (heads, -1)) for t in ts], 1).flatten(0, 2)

    return Rule(tuple(ours), theirs, split, join)


def letters(branch: str, kind: str, which: str = "qkv") -> list[str]:
    """The names of an attention's maps: letters("stack.layers.0.branches.mixer", "weight")."""
    return [f"{branch}.{letter}.{kind}" for letter in which]
