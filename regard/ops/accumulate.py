"""Gradients of weights that are added to where they are summed up as soon as they are made, instead of being made
first, and then read and added."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor


class GradientBuffers(Protocol):
    """Who sums up gradients."""

    def buffer_for(self, weight: Tensor) -> Tensor | None:
        """Return where the gradients of a weight are summed up; None: elsewhere."""


class _Now(threading.local):
    buffers: GradientBuffers | None = None
    loss_scale: float = 1.0


_now = _Now()


@contextmanager
def accumulate_into(buffers: GradientBuffers, loss_scale: float) -> Iterator[None]:
    """Inside, in this thread, ops add the gradients of weights to these buffers.

    loss_scale: what a loss will be multiplied by before its backward pass, so that a gradient that is made together
        with the loss is the right one.
    """
    before = _now.buffers, _now.loss_scale
    _now.buffers, _now.loss_scale = buffers, loss_scale
    try:
        yield
    finally:
        _now.buffers, _now.loss_scale = before


def is_accumulating() -> bool:
    return _now.buffers is not None


def buffer_for(weight: Tensor) -> tuple[float, Tensor | None]:
    """Return the scale of the loss and the buffer for the gradient of a weight; 1, None where it is not accumulated
    here, as on other devices, which would have to be waited for to check that the scale was right."""
    buffer = None if _now.buffers is None or not weight.is_cpu else _now.buffers.buffer_for(weight)
    return (1.0, None) if buffer is None else (_now.loss_scale, buffer)
