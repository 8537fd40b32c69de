"""The state of a model between two steps. Steps may be taken from any state, any number of times and in any order:
tree search, beam search and speculative decoding rely on it.

A step writes its keys and values into the buffers of the state that it was given, so several states share buffers. Each
state holds a `Version`, and all that share buffers one `History`. A step from a state that is not the newest one alive
gets buffers of its own; where the newer ones are gone, it overwrites what they wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from regard.errors import UserError

from .mixer import join, map_tensors, select


class History:
    """What was written to buffers that several states may share.

    alive:    the versions that states still hold, oldest first.
    newest:   the number of the last version, whether it is alive or not.
    furthest: (batch,) the end of what was ever written for each row.
    stale:    the buffers are copies of ones that were written beyond the positions of the copied state.
    in_graph: a step with gradients may have saved them for its backward pass.
    """

    def __init__(self, furthest: Tensor, stale: bool = False):
        self.alive: list[ref[Version]] = []
        self.newest = -1
        self.furthest, self.stale, self.in_graph = furthest, stale, False
        self.given_up = False  # by `reorder`


class Version:
    """One state's claim to the buffers that it shares with others."""

    def __init__(self, history: History):
        history.alive = [*(one for one in history.alive if one() is not None), ref(self)]
        history.newest += 1
        self.history, self.number = history, history.newest

    @classmethod
    def of_new_buffers(cls, furthest: Tensor, stale: bool = False) -> Version:
        return cls(History(furthest, stale))

    def of_copied_buffers(self, furthest: Tensor) -> Version:
        """Return the version of a copy, in which the same positions are overwritten. furthest: of the copied rows."""
        self.check_not_given_up()
        return Version.of_new_buffers(furthest, self.may_be_overwritten)

    @property
    def may_be_overwritten(self) -> bool:
        """Whether the buffers were written beyond the positions of this state, and so may lack what it needs."""
        return self.history.stale or not self.is_newest

    def after(self, lengths: Tensor) -> Version:
        """Return the version of the state after a step that wrote into these buffers up to `lengths` (batch,)."""
        self.history.furthest = torch.maximum(self.history.furthest, lengths)
        self.history.in_graph |= torch.is_grad_enabled()
        return Version(self.history)

    @property
    def is_newest(self) -> bool:
        """Whether no step was taken from this state before."""
        return self.number == self.history.newest

    @property
    def is_newest_alive(self) -> bool:
        """Whether all states that were made from this one are gone."""
        alive = [version for one in self.history.alive if (version := one()) is not None]
        return alive[-1] is self

    def check_not_given_up(self) -> None:
        if self.history.given_up:
            why = "this state, or one that shares its buffers, was given up to `reorder`"
            raise UserError(f"{why}: continue from what that returned, or use `select`")

    def __reduce__(self) -> tuple:
        self.check_not_given_up()
        return Version.of_new_buffers, (self.history.furthest, self.may_be_overwritten)


class State(NamedTuple):
    """The decoding state of every row of a batch."""

    lengths: Tensor  # (batch,) positions taken so far
    layers: tuple  # for every layer, the states of its branches
    version: Version

    @classmethod
    def of_new_buffers(cls, lengths: Tensor, layers: tuple) -> State:
        return cls(lengths, layers, Version.of_new_buffers(lengths))

    def select(self, rows: Tensor) -> State:
        """Return the state of these rows, in buffers of their own."""
        return self.of_rows(rows, select(self.layers, rows))

    def of_rows(self, rows: Tensor, layers: tuple) -> State:
        """Return the state of these rows, whose buffers are given."""
        return State(self.lengths[rows], layers, self.version.of_copied_buffers(self.version.history.furthest[rows]))

    @staticmethod
    def join(states: Sequence[State]) -> State:
        for state in states:
            state.version.check_not_given_up()
        lengths, furthest = (
            torch.cat(every)
            for every in ([state.lengths for state in states], [state.version.history.furthest for state in states])
        )
        stale = any(state.version.may_be_overwritten for state in states)
        return State(lengths, join([state.layers for state in states]), Version.of_new_buffers(furthest, stale))

    def copy(self) -> State:
        """Return the same state in buffers of its own."""
        return self.select(torch.arange(len(self.lengths), device=self.lengths.device))

    def __deepcopy__(self, memo: dict) -> State:
        """Copy it even where gradients flow through it, which torch refuses to deepcopy."""
        return self.copy()

    def outside_inference(self) -> State:
        """Return the same state in tensors that may be written and differentiated outside of inference mode."""
        layers = map_tensors(self.layers, torch.clone)
        return State(
            self.lengths.clone(), layers, self.version.of_copied_buffers(self.version.history.furthest.clone())
        )
