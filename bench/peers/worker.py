"""The loop of every contender: wait for a command, work, and report the time. Needs nothing but Python."""

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any


def peak() -> float:
    """Return the peak of resident memory so far, in MiB."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def rest() -> None:
    """Reset the peak of resident memory."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


class Held(threading.Thread):
    """The peak memory of this process and its workers together, in MiB. Shared pages count once; files that others have
    mapped as well count in full. Sampling is slow, so it is done ten times a second during the first round, which does
    not count, and after each of the others."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.warm = 0.0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self.warm.wait(0.1):
            self.look()

    def look(self) -> float:
        pids = [os.getpid(), *(one.pid for one in multiprocessing.active_children())]
        own = sum(self.told(f"/proc/{pid}/smaps_rollup", "Pss_Anon:", "Pss_Shmem:") for pid in pids)
        self.most = max(self.most, (own + self.told("/proc/self/status", "RssFile:")) / 1024)
        return self.most

    def after(self) -> float:
        """Sample at the end of a round."""
        self.warm.set()
        return self.look()

    @staticmethod
    def told(file: str, *names: str) -> int:
        try:
            with open(file) as lines:
                words = [line.split() for line in lines]
        except OSError:
            return 0  # it has just ended
        return sum(int(line[1]) for line in words if line and line[0] in names)


def serve(go: Callable[..., dict[str, Any]], **others: Callable[..., dict[str, Any]]) -> None:
    """Answer lines of input ("go ...", other commands, "end") with lines of JSON. Other prints go to the terminal."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        word, *given = line.split()
        if word == "end":
            told: dict[str, Any] = {"peak": peak()}
        elif word == "go":
            begun = time.perf_counter()
            told = go(*given)
            told.setdefault("seconds", time.perf_counter() - begun)
        else:
            told = others[word](*given)
        answer.write(json.dumps(told) + "\n")
        answer.flush()
        if word == "end":
            return
