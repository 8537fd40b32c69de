"""Decodes several batches in parallel: on a CPU, one core per batch is faster than all cores sharing every small matrix
product of one batch. Uses forked processes where possible, threads otherwise."""

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


def run_parallel(
    jobs: Sequence[Job], work: Callable[[Job], Done], workers: int, forks: bool = False
) -> Iterator[tuple[Job, Done]]:
    """Yield each job and `work(job)` in the order of completion; `workers` run at a time, forked processes or
    threads."""
    workers = min(workers, len(jobs))
    if workers < 2:
        for job in jobs:
            yield job, work(job)
        return
    yield from (_by_forks if forks else _by_threads)(jobs, work, workers)


def _by_threads(jobs: Sequence[Job], work: Callable[[Job], Done], workers: int) -> Iterator[tuple[Job, Done]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for the new threads
    pool = ThreadPoolExecutor(workers)
    try:
        futures = {pool.submit(work, job): job for job in jobs}
        for done in as_completed(futures):
            yield futures[done], done.result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _by_forks(jobs: Sequence[Job], work: Callable[[Job], Done], workers: int) -> Iterator[tuple[Job, Done]]:
    helpers: list[Fork] = []
    load_kernels()  # before forking, so that every process has them
    try:
        for _ in range(workers):
            helpers.append(Fork(lambda number: work(jobs[number]), helpers, "decoding"))
        waiting = iter(range(len(jobs)))
        busy = {}
        for helper in helpers:
            busy[helper.line] = helper, next(waiting)
            helper.send(busy[helper.line][1])
        while busy:
            ready = wait(list(busy), machine.POLL_SECONDS)
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
