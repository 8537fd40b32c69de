"""More processes that learn from a share of each batch, on a processor: two cores that work on half a batch each get
further than two that share every small product.

They are forks of this one. Weights lie in memory that all of them see, and gradients in memory that this one sees, so
that nothing but tokens is sent. What each draws at random depends on a seed that comes with its share: the same steps
follow from the same state.
"""

from __future__ import annotations

import atexit
import mmap
import multiprocessing
import os
import signal
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.core import UserError
from regard.data.batches import Batch

Learn = Callable[[Sequence[Batch], int], list[Tensor]]  # parts of a step over so many tokens -> sums of -log p


def possible(device: torch.device) -> bool:
    return device.type == "cpu" and sys.platform == "linux"


class Hands:
    """learn: what each process does with its share. many: processes besides this one."""

    def __init__(self, learn: Learn, parameters: list[nn.Parameter], many: int):
        self.parameters = parameters
        for parameter in parameters:
            parameter.data = _shared(parameter.data)
        self._hands: list[_Hand] = []
        for _ in range(many):
            self._hands.append(_Hand(learn, parameters, [hand.line for hand in self._hands]))
        atexit.register(_close, weakref.ref(self))  # before multiprocessing waits for them

    def close(self) -> None:
        """They end, once they are done with what they have."""
        for hand in self._hands:
            hand.line.close()

    def __len__(self) -> int:
        return len(self._hands)

    def give(self, shares: Sequence[Sequence[Batch]], count: int) -> None:
        """A share for each, of a step over `count` tokens; what they draw follows from torch's generator."""
        seeds = torch.randint(1 << 62, (len(self),)).tolist()
        for hand, share, seed in zip(self._hands, shares, seeds, strict=True):
            hand.tell((_plain(share), count, seed))

    def take(self) -> list[float]:
        """When all are done: their gradients are added to those that are here. The sums of -log p."""
        sums = []
        for hand in self._hands:
            nll, made = hand.hear()
            sums.append(nll)
            for index in made:
                parameter, more = self.parameters[index], hand.gradients[index]
                if parameter.grad is None:
                    parameter.grad = more.clone()
                else:
                    parameter.grad.add_(more)
        return sums


def _close(known: weakref.ref[Hands]) -> None:
    hands = known()
    if hands is not None:
        hands.close()


class _Hand:
    def __init__(self, learn: Learn, parameters: list[nn.Parameter], others: list[Connection]):
        self.gradients = [_shared(torch.zeros_like(parameter.data)) for parameter in parameters]
        process = multiprocessing.get_context("fork")
        self.line, theirs = process.Pipe()
        given = (learn, parameters, self.gradients, theirs, [self.line, *others])
        self.process = process.Process(target=_work, args=given, daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, what: Any) -> None:
        try:
            self.line.send(what)
        except OSError:
            raise _gone() from None

    def hear(self) -> Any:
        try:
            answer = self.line.recv()
        except (EOFError, OSError):
            raise _gone() from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _gone() -> UserError:
    return UserError(
        "a process that helps in training has ended, for lack of memory perhaps: go on with --resume, and with "
        "--threads 1 there is no such process"
    )


def _work(
    learn: Learn, parameters: list[nn.Parameter], gradients: list[Tensor], line: Connection, others: list[Connection]
) -> None:
    """Until the process that it is for ends."""
    for other in others:  # so that the end of that process is heard
        other.close()
    for asked in (signal.SIGINT, signal.SIGTERM):
        signal.signal(asked, signal.SIG_IGN)  # which are for that process alone
    torch.set_num_threads(1)
    try:
        while True:
            line.send(_answer(learn, parameters, gradients, *line.recv()))
    except (EOFError, OSError):
        os._exit(0)


def _answer(
    learn: Learn, parameters: list[nn.Parameter], gradients: list[Tensor], share: list[tuple], count: int, seed: int
) -> tuple[float, list[int]] | Exception:
    """The sum of -log p, and the numbers of those that have a gradient now; or what went wrong."""
    try:
        torch.manual_seed(seed)
        for parameter in parameters:
            parameter.grad = None
        nll = sum(float(one) for one in learn([_batch(one) for one in share], count))
        made = []
        for index, parameter in enumerate(parameters):
            if parameter.grad is not None:
                gradients[index].copy_(parameter.grad)
                made.append(index)
        return nll, made
    except UserError as error:
        return error
    except Exception:
        return RuntimeError(traceback.format_exc())


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
