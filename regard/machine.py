"""What is asked of the machine: helpers that are forks of this process, and memory that stays with it."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch

from regard.core import UserError

LARGE = 1 << 30  # bytes, up to which memory is not asked of the system piece by piece
MMAP_THRESHOLD, TRIM_THRESHOLD, TOP_PAD, ARENA_MAX = -3, -1, -2, -8  # as malloc.h has them
PAGE, HUGE_PAGES = 2 << 20, 14  # bytes of a huge page; as madvise knows it


def forks(device: torch.device) -> bool:
    """Whether helpers on this device can be forks. A thread may hold what a fork of another would wait for, hence the
    first thread alone."""
    first = threading.current_thread() is threading.main_thread()
    return device.type == "cpu" and sys.platform == "linux" and first


class Fork:
    """A process that knows all that this one knew, and answers what it is told, in that order.

    answer: what it does with what it is told.
    others: those that are there already; it does not keep this process's lines to them open.
    helps:  in what, for the message when it is gone.
    """

    def __init__(self, answer: Callable[..., Any], others: Sequence[Fork], helps: str):
        process = multiprocessing.get_context("fork")
        self.line, theirs = process.Pipe()
        self.helps = helps
        lines = [self.line, *(other.line for other in others)]
        self.process = process.Process(target=_work, args=(answer, theirs, lines), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, *what: Any) -> None:
        try:
            self.line.send(what)
        except OSError:
            raise self._gone() from None

    def hear(self) -> Any:
        try:
            answer = self.line.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """It ends, once it is done with what it has."""
        self.line.close()

    def _gone(self) -> UserError:
        return UserError(f"a process that helps in {self.helps} has ended, for lack of memory perhaps")


def _work(answer: Callable[..., Any], line: Connection, others: list[Connection]) -> None:
    """Until the process that it is for ends."""
    for other in others:  # so that the end of that process is heard
        other.close()
    for asked in (signal.SIGINT, signal.SIGTERM):
        signal.signal(asked, signal.SIG_IGN)  # which are for that process alone
    torch.set_num_threads(1)
    gc.freeze()  # what was there before is not looked through again and again
    try:
        while True:
            line.send(_try(answer, *line.recv()))
    except (EOFError, OSError):
        os._exit(0)


def _try(answer: Callable[..., Any], *told: Any) -> Any:
    try:
        return answer(*told)
    except UserError as error:
        return error
    except Exception:
        return RuntimeError(traceback.format_exc())


@cache
def keep_memory() -> bool:
    """What is freed stays with this process for what comes next. Otherwise glibc gives large tensors back to the
    system, and the next ones are made of fresh pages, which takes longer than to fill them. Whether it is so now."""
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    asked = {MMAP_THRESHOLD: LARGE, TRIM_THRESHOLD: 2 * LARGE - 1, TOP_PAD: 1 << 26, ARENA_MAX: 1}
    try:
        kept = min(library.mallopt(what, much) for what, much in asked.items()) == 1
    except AttributeError:
        return False  # another library
    if kept:
        _in_huge_pages(library)
    return kept


def give_back_memory() -> None:
    """What is free now goes back to the system: forks would hold it, too, and each would soon have its own."""
    if keep_memory():
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        _in_huge_pages(library)


def _in_huge_pages(library: ctypes.CDLL) -> None:
    """The memory that malloc takes next comes in pages of two megabytes, where the system gives them to whoever asks:
    there are fewer to make and to look up. It is asked for at once and freed again, so that nothing of it is used."""
    library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = LARGE - PAGE
    room = library.malloc(size)
    if room is not None:
        begin, end = -(-room // PAGE) * PAGE, (room + size) // PAGE * PAGE
        library.madvise(begin, end - begin, HUGE_PAGES)  # who says no is asked no more
        library.free(room)
