"""The contract of objectives: a function of a model and a batch that returns a loss. Some carry state between
batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from regard.core import Model
from regard.data.batches import Batch


class Loss(NamedTuple):
    """Sums over the target tokens."""

    loss: Tensor  # to be minimized
    nll: Tensor  # -log p of the targets, without smoothing
    count: int


Objective = Callable[[Model, Batch], Loss]


@runtime_checkable
class StatefulObjective(Protocol):
    """An objective that carries state from one batch to the next."""

    def state(self) -> dict[str, Tensor]:
        """Return the state as tensors."""

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Load what `state` returned; start fresh if it is empty."""
