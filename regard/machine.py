"""Process-wide resources: forked worker processes, memory settings, and interruptible calls."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from regard.errors import UserError
from regard.native.malloc import keep_memory

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")

MAX_IDLE = 120.0  # seconds without CPU time, after which a busy worker is killed
POLL_SECONDS = 1.0  # between two checks of a worker


_tuned: list[bool] = []  # holds something once `tune` was called


def tune() -> None:
    """Let regard treat this process as its own, for speed: freed memory stays with it, training and decoding start
    worker processes and set the number of threads while they run, and oneDNN is told to leave alone what a virtual
    machine hides. The command line calls this first; a host program may, before it uses torch. Without it, `load` and
    `predict` change nothing in the process that they run in."""
    _tuned[:] = [True]
    keep_memory()
    if _hides_amx_sizes():  # which oneDNN would use nevertheless in half precision, and die of it
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def is_tuned() -> bool:
    return bool(_tuned)


def forks(device: torch.device) -> bool:
    """Return whether workers on this device can be forks of this process: see `tune`. A thread may hold what a fork of
    another would wait for, hence the first thread alone."""
    first = threading.current_thread() is threading.main_thread()
    return is_tuned() and device.type == "cpu" and sys.platform == "linux" and first


def cpu_lines(entry: str) -> list[str]:
    """Return what /proc/cpuinfo says for an entry, once for every core; nothing where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.startswith(entry)]


def _hides_amx_sizes() -> bool:
    """Return whether there are matrix tiles (AMX) whose sizes the CPU does not tell, as in some virtual machines."""
    flags, level = cpu_lines("flags")[:1], cpu_lines("cpuid level")[:1]
    return bool(flags and level) and "amx_tile" in flags[0].split() and int(level[0]) < 0x1D


class HelperLost(UserError):
    """A worker process has ended or hangs."""


class Fork:
    """A forked worker process, which answers messages in order. If it was killed, is stopped or hangs, `send` and
    `recv` kill it and raise HelperLost.

    answer: called with each message; its result is sent back.
    others: existing workers, whose pipes it closes.
    helps:  what it works on, for error messages.
    """

    def __init__(self, answer: Callable[..., Any], others: Sequence[Fork], helps: str):
        process = multiprocessing.get_context("fork")
        self.line, theirs = process.Pipe()
        self.helps = helps
        lines = [self.line, *(other.line for other in others)]
        self.process = process.Process(target=_work, args=(answer, theirs, lines), daemon=True)
        self.process.start()
        theirs.close()
        self._used: float | None = None
        self._idle = 0.0
        _set_timeout(self.line, MAX_IDLE)

    def send(self, *what: Any) -> None:
        self._used, self._idle = None, 0.0
        with self._lost():
            self.line.send(what)

    def recv(self) -> Any:
        with self._lost():
            while not self.line.poll(POLL_SECONDS):
                self.check()
            answer = self.line.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def check(self) -> None:
        """Raise HelperLost if the worker hangs; called after every POLL_SECONDS without an answer. Only time without
        CPU use of the worker counts, and it is counted in calls, so that time in which this process was stopped does
        not."""
        used = _cpu_seconds(self.process.pid)
        self._idle = self._idle + POLL_SECONDS if used is not None and used == self._used else 0.0
        self._used = used
        if self._idle >= MAX_IDLE:
            raise self._hangs()

    def close(self) -> None:
        """Kill the worker."""
        self.line.close()
        self.process.kill()
        self.process.join()

    @contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:  # the pipe was blocked for MAX_IDLE seconds
            raise self._hangs() from None
        except (EOFError, OSError):
            self.close()
            raise self._error("has ended, for lack of memory perhaps") from None

    def _hangs(self) -> HelperLost:
        self.close()
        return self._error(f"did nothing for {MAX_IDLE:g} seconds, as if somebody had stopped it, and was ended")

    def _error(self, what: str) -> HelperLost:
        return HelperLost(f"a process that helps in {self.helps} {what} (with --threads 1 there is no such process)")


def _set_timeout(line: Connection, seconds: float) -> None:
    """Make sending and receiving fail with BlockingIOError after so many seconds without progress."""
    with socket.socket(fileno=os.dup(line.fileno())) as end:
        end.setblocking(True)
        for which in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, which, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))


def _cpu_seconds(pid: int | None) -> float | None:
    """Return the CPU seconds of a process; None where they are unknown."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(told[11]) + int(told[12])) / os.sysconf("SC_CLK_TCK")  # user and system time
    except (OSError, ValueError, IndexError):
        return None


def _work(answer: Callable[..., Any], line: Connection, others: list[Connection]) -> None:
    """Answer messages until the parent process ends."""
    for other in others:  # so that the end of the parent is noticed
        other.close()
    for asked in (signal.SIGINT, signal.SIGTERM):
        signal.signal(asked, signal.SIG_IGN)  # the parent handles them
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # objects from before the fork are not collected again
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


_command_lines: list[bool] = []  # one for each that runs in this process
_left_behind: list[threading.Thread] = []


@contextmanager
def command_line() -> Iterator[None]:
    """Inside, this process is that of the command `regard`, and nobody else's: see `interruptible`."""
    _command_lines.append(True)
    try:
        yield
    finally:
        _command_lines.pop()


def interruptible(work: Callable[[], Result]) -> Result:
    """Return what `work` returns: something long, in a library that sees no signals. On the command line it is done in
    another thread, so that Ctrl-C is heard at once; that thread is left behind then. Others are not disturbed."""
    if not _command_lines or threading.current_thread() is not threading.main_thread():
        return work()
    made: list[Result] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append(work())
        except BaseException as error:  # to be raised where it is waited for
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.1)
    except BaseException:
        _left_behind.append(thread)
        raise
    if failed:
        raise failed[0]
    return made[0]


def leave(code: int) -> None:
    """End this process at once if a thread was left behind in a library: it would not end with the others."""
    if any(thread.is_alive() for thread in _left_behind):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
