"""What a person sees while a model learns: a bar and a line under it that move, or a line now and then where nothing
can move."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from regard.errors import printable

EVERY = 30.0  # seconds between lines where the output is no terminal


class Bar:
    """`say` prints a sentence, `tick` counts preparations, `report` follows the training."""

    def __init__(self, console: Console, names: dict[str, str] | None = None):
        self.console, self.names = console, names or {}
        self.moving = console.is_terminal
        self.progress = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            console=console,
            expand=True,
        )
        self.line = Text()
        self.task: Any = None
        self.told = time.monotonic()
        self.shown: dict[str, float] = {}

    def say(self, sentence: str) -> None:
        self.console.print(Text(printable(sentence)), soft_wrap=True)  # so that a command can be copied whole

    def tick(self, what: str, done: int) -> None:
        if not self.moving:
            return
        if self.task is None:
            self.task = self.progress.add_task("", total=None)
        self.line.plain = f"  {what} {done:,}" if done else f"  {what}"

    def report(self, now: Any) -> None:
        loss = f"loss {now.loss:.3f}"
        measured = "  ".join(f"{self.names.get(k, k)} {v:.2f}" for k, v in now.metrics.items() if k != "step")
        measured = measured and f"dev at step {now.metrics['step']:,}: {measured}"
        speed = f"{now.speed:,.0f} tokens/s"
        left = "" if now.left is None else f"{clock(now.left)} left"
        if self.moving:
            self.line.plain = f"  step {now.step:,}  {loss}" + (f"  {measured}" if measured else "")
            if self.task is None:
                self.task = self.progress.add_task("", total=1.0)
            told = "  ".join(part for part in (f"{100 * now.done:.0f} %", speed, left) if part)
            self.progress.update(self.task, description=told, total=1.0, completed=now.done)
        elif time.monotonic() - self.told > EVERY or now.metrics != self.shown:
            self.told, self.shown = time.monotonic(), now.metrics
            parts = [f"step {now.step:,}", f"epoch {now.epoch:.2f}", loss, measured, speed, left]
            self.say("  ".join(part for part in parts if part))

    @contextmanager
    def running(self) -> Iterator[Bar]:
        if not self.moving:
            yield self
            return
        with Live(Group(self.progress, self.line), console=self.console, refresh_per_second=8):
            yield self


def clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
