"""Several batches at once: on a CPU, two cores that work on a batch each get further than two that share every
small product of one. By processes of their own where there can be some, by threads otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import wait
from typing import TypeVar

import torch

from regard import machine
from regard.machine import Fork
from regard.native.build import load_kernels

Job = TypeVar("Job")
Done = TypeVar("Done")


def at_once(
    jobs: Sequence[Job], work: Callable[[Job], Done], many: int, forks: bool = False
) -> Iterator[tuple[Job, Done]]:
    """Each job and what `work` makes of it, as they are done; `many` at a time, by forks if that is said."""
    many = min(many, len(jobs))
    if many < 2:
        for job in jobs:
            yield job, work(job)
        return
    yield from (_by_forks if forks else _by_threads)(jobs, work, many)


def _by_threads(jobs: Sequence[Job], work: Callable[[Job], Done], many: int) -> Iterator[tuple[Job, Done]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what the new threads begin with
    pool = ThreadPoolExecutor(many)
    try:
        asked = {pool.submit(work, job): job for job in jobs}
        for done in as_completed(asked):
            yield asked[done], done.result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _by_forks(jobs: Sequence[Job], work: Callable[[Job], Done], many: int) -> Iterator[tuple[Job, Done]]:
    helpers: list[Fork] = []
    load_kernels()  # which all of them have then
    try:
        for _ in range(many):
            helpers.append(Fork(lambda number: work(jobs[number]), helpers, "decoding"))
        waiting = iter(range(len(jobs)))
        busy = {}
        for helper in helpers:
            busy[helper.line] = helper, next(waiting)
            helper.send(busy[helper.line][1])
        while busy:
            ready = wait(list(busy), machine.LOOK_EVERY)
            for helper, _ in busy.values() if not ready else ():
                helper.check()
            for line in ready:
                helper, number = busy.pop(line)  # type: ignore[call-overload]
                done = helper.recv()
                following = next(waiting, None)
                if following is not None:
                    helper.send(following)
                    busy[helper.line] = helper, following
                yield jobs[number], done
    finally:
        for helper in helpers:
            helper.close()
