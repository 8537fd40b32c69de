"""Several batches at once, each by a thread of its own: on a processor, two cores that work on a batch each get further
than two that share every small product of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

import torch

Job = TypeVar("Job")
Done = TypeVar("Done")


def at_once(jobs: Sequence[Job], work: Callable[[Job], Done], many: int) -> Iterator[tuple[Job, Done]]:
    """Each job and what `work` makes of it, as they are done; `many` at a time."""
    if many < 2 or len(jobs) < 2:
        for job in jobs:
            yield job, work(job)
        return
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
