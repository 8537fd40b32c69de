"""Stop on signals: the first Ctrl-C, SIGTERM or SIGHUP asks to stop once all is saved, the second stops at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(Exception):
    """Raised inside `Stop.interruptible` by a signal."""


class Stop:
    """Records whether a signal asked to stop, in `requested`."""

    def __init__(self) -> None:
        self.requested = self._interruptible = False

    @contextmanager
    def catch_signals(self) -> Iterator[None]:
        """Catch signals inside the `with` block. Ignored signals stay ignored; outside the main thread none can be
        caught."""
        self.requested = False
        old: dict[signal.Signals, Any] = {}
        try:
            for which in SIGNALS:
                if signal.getsignal(which) != signal.SIG_IGN:
                    old[which] = signal.signal(which, self._on_signal)
        except ValueError:
            pass
        try:
            yield
        finally:
            for which, handler in old.items():
                signal.signal(which, handler)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let the first signal raise Stopped inside the `with` block, for long work that can be repeated later."""
        if self.requested:
            raise Stopped
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def _on_signal(self, *_: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._interruptible:
            raise Stopped
