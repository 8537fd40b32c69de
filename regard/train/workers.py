"""Data-parallel training on a CPU: worker processes compute gradients of their shares of each batch. Two cores with
half a batch each are faster than two that share every small matrix product.

Workers are forks of this process. Weights are in memory shared with all of them, and a worker's gradients in memory
shared with this process, so that only tokens are sent. Each share comes with a random seed, so that the same state
leads to the same steps.
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

Learn = Callable[[Sequence[Batch], int], list[Tensor]]  # micro-batches, target tokens of the step -> sums of -log p


class Workers:
    """Worker processes besides this one.

    learn: adds the gradients of a share of a step.
    count: number of processes.
    """

    def __init__(self, learn: Learn, gradients: Gradients, count: int):
        self.gradients = gradients
        for parameter in gradients.parameters:
            parameter.data = _shared(parameter.data)
        gradients.zero()  # which finds parameters by their addresses
        give_back_memory()
        gc.collect()
        gc.freeze()  # existing objects stay: scanning them in every process would copy their pages
        self._workers: list[_Worker] = []
        for _ in range(count):
            self._workers.append(_Worker(learn, gradients, self._workers))
        atexit.register(_close, weakref.ref(self))  # before multiprocessing waits for them

    def close(self) -> None:
        """End all worker processes, whatever they are doing."""
        for worker in self._workers:
            worker.close()
        gc.unfreeze()

    def __len__(self) -> int:
        return len(self._workers)

    def scatter(self, shares: Sequence[Sequence[Batch]], count: int) -> None:
        """Send each worker its share of a step over `count` target tokens, and a seed from torch's generator."""
        seeds = torch.randint(1 << 62, (len(self),)).tolist()
        with self._all_or_none():
            for worker, share, seed in zip(self._workers, shares, seeds, strict=True):
                worker.send(_plain(share), count, seed)

    def gather(self) -> list[float]:
        """Wait for all workers, add their gradients to those of this process, and return their sums of -log p."""
        sums = []
        with self._all_or_none():
            for worker in self._workers:
                nll, used = worker.recv()
                sums.append(nll)
                for index in used:
                    self.gradients.add(index, worker.buffers[index])
        return sums

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """When one worker is lost, end the others as well: their answers would never be read."""
        try:
            yield
        except HelperLost:
            self.close()
            raise


def _close(reference: weakref.ref[Workers]) -> None:
    workers = reference()
    if workers is not None:
        workers.close()


class _Worker(Fork):
    """Answers with the sum of -log p, and the indices of the parameters that received a gradient."""

    def __init__(self, learn: Learn, gradients: Gradients, others: Sequence[Fork]):
        self.buffers = [_shared(buffer) for buffer in gradients.buffers]

        def answer(share: list[tuple], count: int, seed: int) -> tuple[float, list[int]]:
            torch.manual_seed(seed)
            gradients.buffers = self.buffers  # in the worker process alone
            gradients.zero()
            nll = sum(float(one) for one in learn([_batch(one) for one in share], count))
            return nll, sorted(gradients.used)

        super().__init__(answer, others, "training")


def _shared(tensor: Tensor) -> Tensor:
    """Return a copy in memory that forks of this process share."""
    if not tensor.numel():
        return tensor
    memory = mmap.mmap(-1, tensor.nbytes)
    new = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape)
    return new.copy_(tensor)


def _plain(share: Sequence[Batch]) -> list[tuple]:
    """Return batches with NumPy arrays for tensors, since torch sends each tensor through a file of its own."""
    return [tuple(field.numpy() if isinstance(field, Tensor) else field for field in one) for one in share]


def _batch(plain: tuple) -> Batch:
    return Batch(*(torch.from_numpy(field) if isinstance(field, np.ndarray) else field for field in plain))
