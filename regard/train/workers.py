"""More processes that learn from a share of each batch, on a CPU: two cores that work on half a batch each get
further than two that share every small product.

They are forks of this one. Weights lie in memory that all of them see, and gradients in memory that this one sees, so
that nothing but tokens is sent. What each draws at random depends on a seed that comes with its share: the same steps
follow from the same state.
"""

from __future__ import annotations

import atexit
import gc
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from regard.data.batches import Batch
from regard.machine import Fork, HelperLost
from regard.native.malloc import give_back_memory

from .gradients import Gradients

Learn = Callable[[Sequence[Batch], int], list[Tensor]]  # parts of a step over so many tokens -> sums of -log p


class Workers:
    """learn: what each process does with its share. many: processes besides this one."""

    def __init__(self, learn: Learn, gradients: Gradients, many: int):
        self.gradients = gradients
        for parameter in gradients.parameters:
            parameter.data = _shared(parameter.data)
        gradients.begin()  # which knows them by where they lie
        give_back_memory()
        gc.collect()
        gc.freeze()  # what is there now stays, and is not looked through again and again, here and in the others
        self._workers: list[_Worker] = []
        for _ in range(many):
            self._workers.append(_Worker(learn, gradients, self._workers))
        atexit.register(_close, weakref.ref(self))  # before multiprocessing waits for them

    def close(self) -> None:
        """All of them end, whatever they are doing."""
        for worker in self._workers:
            worker.close()
        gc.unfreeze()

    def __len__(self) -> int:
        return len(self._workers)

    def scatter(self, shares: Sequence[Sequence[Batch]], count: int) -> None:
        """A share for each, of a step over `count` tokens; what they draw follows from torch's generator."""
        seeds = torch.randint(1 << 62, (len(self),)).tolist()
        with self._all_or_none():
            for worker, share, seed in zip(self._workers, shares, seeds, strict=True):
                worker.send(_plain(share), count, seed)

    def gather(self) -> list[float]:
        """When all are done: their gradients are added to those that are here. The sums of -log p."""
        sums = []
        with self._all_or_none():
            for worker in self._workers:
                nll, made = worker.recv()
                sums.append(nll)
                for index in made:
                    self.gradients.add(index, worker.made[index])
        return sums

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """When one is lost, the others end as well: nobody will ask for their answers."""
        try:
            yield
        except HelperLost:
            self.close()
            raise


def _close(known: weakref.ref[Workers]) -> None:
    workers = known()
    if workers is not None:
        workers.close()


class _Worker(Fork):
    """Tells the sum of -log p, and the numbers of those that have a gradient now."""

    def __init__(self, learn: Learn, gradients: Gradients, others: Sequence[Fork]):
        self.made = [_shared(room) for room in gradients.rooms]

        def answer(share: list[tuple], count: int, seed: int) -> tuple[float, list[int]]:
            torch.manual_seed(seed)
            gradients.rooms = self.made  # in this process alone
            gradients.begin()
            nll = sum(float(one) for one in learn([_batch(one) for one in share], count))
            return nll, sorted(gradients.made)

        super().__init__(answer, others, "training")


def _shared(tensor: Tensor) -> Tensor:
    """The same numbers in memory that forks of this process see as well."""
    if not tensor.numel():
        return tensor
    held = mmap.mmap(-1, tensor.nbytes)
    new = torch.frombuffer(held, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape)
    return new.copy_(tensor)


def _plain(share: Sequence[Batch]) -> list[tuple]:
    """Without torch's own way of sending tensors, which takes a file for each."""
    return [tuple(field.numpy() if isinstance(field, Tensor) else field for field in one) for one in share]


def _batch(plain: tuple) -> Batch:
    return Batch(*(torch.from_numpy(field) if isinstance(field, np.ndarray) else field for field in plain))
