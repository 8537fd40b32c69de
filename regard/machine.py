"""What is asked of the machine: helpers that are forks of this process, and memory that stays with it."""

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

SILENCE = 120.0  # seconds without any work, after which a helper that should be working is ended
LOOK_EVERY = 1.0  # seconds between two looks at one


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
    """A helper has ended or hangs, so that its answer will never come."""


class Fork:
    """A process that knows all that this one knew, and answers what it is told, in that order. When it was killed, is
    stopped or hangs, whoever tells it something or waits for its answer gets HelperLost, and the process is gone then.

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
        self._used: float | None = None
        self._silent = 0.0
        _limit(self.line, SILENCE)

    def send(self, *what: Any) -> None:
        self._used, self._silent = None, 0.0
        with self._lost():
            self.line.send(what)

    def recv(self) -> Any:
        with self._lost():
            while not self.line.poll(LOOK_EVERY):
                self.check()
            answer = self.line.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def check(self) -> None:
        """Called whenever its answer was waited for in vain for LOOK_EVERY seconds. Long work is fine as long as it is
        work: what counts is the time without any CPU time of the helper. It is counted in looks, so that the time
        in which this process was stopped as well does not count."""
        used = _processor_time(self.process.pid)
        self._silent = self._silent + LOOK_EVERY if used is not None and used == self._used else 0.0
        self._used = used
        if self._silent >= SILENCE:
            raise self._hangs()

    def close(self) -> None:
        """It ends at once, whatever it is doing."""
        self.line.close()
        self.process.kill()
        self.process.join()

    @contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:  # the line between has not moved for SILENCE seconds
            raise self._hangs() from None
        except (EOFError, OSError):
            self.close()
            raise self._told("has ended, for lack of memory perhaps") from None

    def _hangs(self) -> HelperLost:
        self.close()
        return self._told(f"did nothing for {SILENCE:g} seconds, as if somebody had stopped it, and was ended")

    def _told(self, what: str) -> HelperLost:
        return HelperLost(f"a process that helps in {self.helps} {what} (with --threads 1 there is no such process)")


def _limit(line: Connection, seconds: float) -> None:
    """Sending and receiving fail with BlockingIOError when nothing moves for so long."""
    with socket.socket(fileno=os.dup(line.fileno())) as end:
        end.setblocking(True)
        for which in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, which, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))


def _processor_time(pid: int | None) -> float | None:
    """Return the seconds that a process has worked, None where the system does not tell."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(told[11]) + int(told[12])) / os.sysconf("SC_CLK_TCK")  # user and system time
    except (OSError, ValueError, IndexError):
        return None


def _work(answer: Callable[..., Any], line: Connection, others: list[Connection]) -> None:
    """Until the process that it is for ends."""
    for other in others:  # so that the end of that process is heard
        other.close()
    for asked in (signal.SIGINT, signal.SIGTERM):
        signal.signal(asked, signal.SIG_IGN)  # which are for that process alone
    import torch

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
