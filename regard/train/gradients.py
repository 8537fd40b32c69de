"""Gradient buffers that are allocated once. Gradients allocated in every step would lie between the activations of the
forward pass, and fragment the memory that those give back."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from regard.native import private


class Gradients:
    """The gradients of a list of parameters. used: indices of the parameters that received a gradient in this step."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters, self.used = parameters, set[int]()
        self._index_by_pointer: dict[int, int] = {}  # data_ptr of a parameter -> its index
        self.buffers = [torch.zeros_like(parameter) for parameter in parameters]
        for index, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._mark_used, index))

    def _mark_used(self, index: int, _: Tensor) -> None:
        self.used.add(index)

    def zero(self) -> None:
        """Begin a step: set all gradients to zero, and point every parameter's `grad` at its buffer."""
        private.foreach_zero_(self.buffers)
        for parameter, buffer in zip(self.parameters, self.buffers, strict=True):
            parameter.grad = buffer
        self.used.clear()
        self._index_by_pointer = {parameter.data_ptr(): index for index, parameter in enumerate(self.parameters)}

    def buffer_for(self, weight: Tensor) -> Tensor | None:
        """Return the buffer in which a weight's gradient is accumulated, and count the weight as used. None: the tensor
        is not one of the parameters."""
        index = self._index_by_pointer.get(weight.data_ptr())
        if index is None or self.buffers[index].shape != weight.shape:
            return None  # a view of a parameter, or another tensor
        self.used.add(index)
        return self.buffers[index]

    def add(self, index: int, gradient: Tensor) -> None:
        self.buffers[index].add_(gradient)
        self.used.add(index)

    def drop_unused(self) -> None:
        """End the backward pass: set the `grad` of parameters that received none to None."""
        for index, parameter in enumerate(self.parameters):
            if index not in self.used:
                parameter.grad = None
