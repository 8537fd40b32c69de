"""Ctrl-C and a polite kill: the first asks to stop when it can be done without a loss, the second stops at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(Exception):
    """Raised inside `breakable`."""


class Stop:
    """asked: whether to stop."""

    def __init__(self) -> None:
        self.asked = self._breakable = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Signals that were ignored before stay ignored; outside the main thread none can be caught."""
        self.asked = False
        old: dict[signal.Signals, Any] = {}
        try:
            for which in SIGNALS:
                if signal.getsignal(which) != signal.SIG_IGN:
                    old[which] = signal.signal(which, self._ask)
        except ValueError:
            pass
        try:
            yield
        finally:
            for which, handler in old.items():
                signal.signal(which, handler)

    @contextmanager
    def breakable(self) -> Iterator[None]:
        """Something long that may be broken off and done again later: the first signal raises Stopped in it."""
        if self.asked:
            raise Stopped
        self._breakable = True
        try:
            yield
        finally:
            self._breakable = False

    def _ask(self, *_: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if self._breakable:
            raise Stopped
