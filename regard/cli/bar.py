"""Show the progress of training: a live bar with a status line in a terminal, and a line from time to time
elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from regard.errors import printable

LINE_EVERY = 30.0  # seconds between lines where the output is not a terminal


class Bar:
    """`say` prints a message, `tick` shows the progress of preparations, `report` that of training."""

    def __init__(self, console: Console, names: dict[str, str] | None = None):
        self.console, self.names = console, names or {}
        self.is_live = console.is_terminal
        self.progress = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            console=console,
            expand=True,
        )
        self.line = Text()
        self.task: Any = None
        self.printed_at = time.monotonic()
        self.printed_metrics: dict[str, float] = {}

    def say(self, sentence: str) -> None:
        self.console.print(Text(printable(sentence)), soft_wrap=True)  # so that commands can be copied

    def tick(self, what: str, done: int) -> None:
        if not self.is_live:
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
        if self.is_live:
            self.line.plain = f"  step {now.step:,}  {loss}" + (f"  {measured}" if measured else "")
            if self.task is None:
                self.task = self.progress.add_task("", total=1.0)
            description = "  ".join(part for part in (f"{100 * now.done:.0f} %", speed, left) if part)
            self.progress.update(self.task, description=description, total=1.0, completed=now.done)
        elif time.monotonic() - self.printed_at > LINE_EVERY or now.metrics != self.printed_metrics:
            self.printed_at, self.printed_metrics = time.monotonic(), now.metrics
            parts = [f"step {now.step:,}", f"epoch {now.epoch:.2f}", loss, measured, speed, left]
            self.say("  ".join(part for part in parts if part))

    @contextmanager
    def running(self) -> Iterator[Bar]:
        if not self.is_live:
            yield self
            return
        with Live(Group(self.progress, self.line), console=self.console, refresh_per_second=8):
            yield self


@contextmanager
def counting(what: str, total: int | None, console: Console) -> Iterator[Callable[[int], None]]:
    """Show a bar with the number of examples done and the time left; yield the function to call with more of them."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)


def clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
