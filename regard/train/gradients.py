"""Gradients in memory that is asked for once: made anew in every step, they would lie among what the forward pass
leaves behind, and keep its memory from being used again."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from regard.native import private


class Gradients:
    """Of some parameters. made: the numbers of those that have one now."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters, self.made = parameters, set[int]()
        self._at: dict[int, int] = {}  # which parameter lies where
        self.rooms = [torch.zeros_like(parameter) for parameter in parameters]
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._note, index))

    def _note(self, index: int, _: Tensor) -> None:
        self.made.add(index)

    def begin(self) -> None:
        """From nothing."""
        private.foreach_zero_(self.rooms)
        for parameter, room in zip(self.parameters, self.rooms, strict=True):
            parameter.grad = room
        self.made.clear()
        self._at = {parameter.data_ptr(): index for index, parameter in enumerate(self.parameters)}

    def buffer(self, weight: Tensor) -> Tensor | None:
        """Where the gradient of a weight is added up; it is there from now on."""
        index = self._at.get(weight.data_ptr())
        if index is None or self.rooms[index].shape != weight.shape:
            return None  # a view of it, or of no parameter
        self.made.add(index)
        return self.rooms[index]

    def add(self, index: int, more: Tensor) -> None:
        self.rooms[index].add_(more)
        self.made.add(index)

    def end(self) -> None:
        """What nothing was added to has no gradient."""
        for index, parameter in enumerate(self.parameters):
            if index not in self.made:
                parameter.grad = None
