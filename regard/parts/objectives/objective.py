"""What every objective is: a function from a model and a batch to a loss; some carry a state from batch to batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from regard.core import Model
from regard.data.batches import Batch


class Loss(NamedTuple):
    """Sums over the tokens that were asked for."""

    loss: Tensor  # to be minimised
    nll: Tensor  # -log p of the right tokens, without smoothing
    count: int


Objective = Callable[[Model, Batch], Loss]


@runtime_checkable
class Remembers(Protocol):
    """An objective that carries something from one batch to the next."""

    def state(self) -> dict[str, Tensor]:
        """Return all of it, in tensors."""

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `state` returned; where that is empty, begin anew."""
