"""What a run tells of itself, for programs and for TensorBoard: each step once, however often the run was killed.

metrics.jsonl   {"step": 20, "epoch": 0.4, "loss": 2.31, "lr": 0.001, "tokens_per_second": 5120, "seconds": 9.2}
                {"step": 20, "dev": {"loss": 2.5, "bleu": 11.2}, "seconds": 9.9}
events.out.tfevents...   one file for every time that the run was gone on with
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter  # not SummaryWriter, whose thread hangs when a disk is full
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from regard.core import UserError
from regard.errors import short
from regard.runs.checkpoint import reason

EVENTS_EVERY = 10  # steps
FLUSH_EVERY = 30.0  # seconds, for those who watch TensorBoard meanwhile


class Journal:
    """Of the run in this folder, after `step` steps of it."""

    def __init__(self, run: Path, step: int):
        self.run = run
        with self._told():
            forget(run / "metrics.jsonl", step)
            self.lines = open(run / "metrics.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
            times = len(list(run.glob("events.out.tfevents.*")))
            self.events = EventsWriter(str(run / "events"), f".{times}")
            if times:  # what TensorBoard has seen from here on no longer counts
                self.events.write_event(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))
        self.flushed = time.monotonic()

    def step(self, step: int, **told: float) -> None:
        """After every one."""
        self._line({"step": step, **told})
        if step % EVENTS_EVERY == 0:
            self._event("train", step, {name: told[name] for name in ("loss", "lr", "tokens_per_second")})
            if time.monotonic() > self.flushed + FLUSH_EVERY:
                self.flush()

    def evaluation(self, step: int, seconds: float, metrics: dict[str, float], kind: str = "dev") -> None:
        """kind: dev, or final: of the model that the run ends with."""
        self._line({"step": step, kind: metrics, "seconds": seconds})
        self._event(kind, step, metrics)

    def flush(self) -> None:
        """Onto the disk."""
        with self._told():
            os.fsync(self.lines.fileno())
            self.events.flush()
        self.flushed = time.monotonic()

    def drop(self) -> None:
        """Close it, whatever became of what was not yet written."""
        for file in (self.lines, self.events):
            with suppress(OSError):
                file.close()

    def _line(self, line: dict[str, Any]) -> None:
        with self._told():
            self.lines.write(json.dumps(_finite(line)) + "\n")

    def _event(self, kind: str, step: int, values: dict[str, float]) -> None:
        told = [Summary.Value(tag=f"{kind}/{name}", simple_value=value) for name, value in values.items()]
        with self._told():
            self.events.write_event(Event(step=step, wall_time=time.time(), summary=Summary(value=told)))

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{short(self.run)} cannot be written to: {reason(error)}; the checkpoints in it are whole, so mend "
                f"that and go on with: regard train --resume {short(self.run)}"
            ) from None


def forget(path: Path, step: int) -> None:
    """Cut off the lines about later steps, the last one if it is only half a line, and what was said at the end."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        kept = 0
        for line in file:
            if not _stays(line, step):
                break
            kept += len(line)
        file.truncate(kept)


def _stays(line: bytes, step: int) -> bool:
    try:
        told = json.loads(line)
        return line.endswith(b"\n") and told["step"] <= step and "final" not in told
    except (ValueError, KeyError, TypeError):
        return False


def _finite(value: Any) -> Any:
    """JSON knows no infinity."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
