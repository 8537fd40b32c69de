"""What every contender does: wait for a word, work, and tell how long it took. Needs nothing but Python."""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def peak() -> float:
    """Largest resident memory so far, in MiB."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def rest() -> None:
    """The peak is counted from here."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass


def serve(go: Callable[..., dict[str, Any]], **others: Callable[..., dict[str, Any]]) -> None:
    """Lines in: "go ...", other words, "end". Lines of JSON out. Whatever else is printed goes to the terminal."""
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
