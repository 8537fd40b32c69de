"""Gradients of weights, added to an accumulation buffer as they are computed, instead of being written first and then
read and added."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor


class GradientBuffers(Protocol):
    """Owner of the buffers in which gradients are accumulated."""

    def buffer_for(self, weight: Tensor) -> Tensor | None:
        """Return the buffer for the gradients of a weight; None where there is none."""


class _Accumulation(threading.local):
    buffers: GradientBuffers | None = None
    loss_scale: float = 1.0


_current = _Accumulation()


@contextmanager
def accumulate_into(buffers: GradientBuffers, loss_scale: float) -> Iterator[None]:
    """Inside, in this thread, ops add the gradients of weights to these buffers.

    loss_scale: the factor by which a loss will be multiplied before its backward pass, for gradients that are computed
        together with the loss.
    """
    before = _current.buffers, _current.loss_scale
    _current.buffers, _current.loss_scale = buffers, loss_scale
    try:
        yield
    finally:
        _current.buffers, _current.loss_scale = before


@contextmanager
def multiplied_by(factor: float) -> Iterator[None]:
    """Inside, in this thread, losses are computed that will be multiplied by a factor besides the loss scale."""
    before = _current.loss_scale
    _current.loss_scale = before * factor
    try:
        yield
    finally:
        _current.loss_scale = before


def is_accumulating() -> bool:
    return _current.buffers is not None


def buffer_for(weight: Tensor) -> tuple[float, Tensor | None]:
    """Return the loss scale and the buffer for the gradient of a weight; (1, None) where it is not accumulated here, as
    on other devices, where checking the scale would need a synchronization."""
    buffer = None if _current.buffers is None or not weight.is_cpu else _current.buffers.buffer_for(weight)
    return (1.0, None) if buffer is None else (_current.loss_scale, buffer)
