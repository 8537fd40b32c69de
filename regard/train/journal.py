"""The log of a run, for programs and for TensorBoard: each step once, however often the run was killed.

metrics.jsonl   {"step": 20, "epoch": 0.4, "loss": 2.31, "lr": 0.001, "tokens_per_second": 5120, "seconds": 9.2}
                {"step": 20, "dev": {"loss": 2.5, "bleu": 11.2}, "seconds": 9.9}
events.out.tfevents...   one file for every session of the run
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
FLUSH_EVERY = 30.0  # seconds, so that TensorBoard can be watched meanwhile


class Journal:
    """The log of the run in a folder, opened for appending after its first `step` steps."""

    def __init__(self, run: Path, step: int):
        self.run = run
        with self._writing():
            truncate_after(run / "metrics.jsonl", step)
            self.lines = open(run / "metrics.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
            times = len(list(run.glob("events.out.tfevents.*")))
            self.events = EventsWriter(str(run / "events"), f".{times}")
            if times:  # let TensorBoard discard what it has seen of later steps
                self.events.write_event(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))
        self.flushed = time.monotonic()

    def step(self, step: int, **values: float) -> None:
        """Log a training step."""
        self._line({"step": step, **values})
        if step % EVENTS_EVERY == 0:
            self._event("train", step, {name: values[name] for name in ("loss", "lr", "tokens_per_second")})
            if time.monotonic() > self.flushed + FLUSH_EVERY:
                self.flush()

    def evaluation(self, step: int, seconds: float, metrics: dict[str, float], kind: str = "dev") -> None:
        """Log an evaluation. kind: dev, or final for the model that the run ends with."""
        self._line({"step": step, kind: metrics, "seconds": seconds})
        self._event(kind, step, metrics)

    def flush(self) -> None:
        """Write everything to the disk."""
        with self._writing():
            os.fsync(self.lines.fileno())
            self.events.flush()
        self.flushed = time.monotonic()

    def close(self) -> None:
        """Close the files, even if they cannot be flushed."""
        for file in (self.lines, self.events):
            with suppress(OSError):
                file.close()

    def _line(self, line: dict[str, Any]) -> None:
        with self._writing():
            self.lines.write(json.dumps(_finite(line)) + "\n")

    def _event(self, kind: str, step: int, values: dict[str, float]) -> None:
        scalars = [Summary.Value(tag=f"{kind}/{name}", simple_value=value) for name, value in values.items()]
        with self._writing():
            self.events.write_event(Event(step=step, wall_time=time.time(), summary=Summary(value=scalars)))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an OSError into a sentence that says how to resume."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{short(self.run)} cannot be written to: {reason(error)}; its checkpoints are intact, so fix that and "
                f"go on with: regard train --resume {short(self.run)}"
            ) from None


def truncate_after(path: Path, step: int) -> None:
    """Remove the lines about later steps, an incomplete last line, and the line of the final model."""
    if not path.exists():
        return
    with open(path, "rb+") as file:
        kept = 0
        for line in file:
            if not _is_kept(line, step):
                break
            kept += len(line)
        file.truncate(kept)


def _is_kept(line: bytes, step: int) -> bool:
    try:
        entry = json.loads(line)
        return line.endswith(b"\n") and entry["step"] <= step and "final" not in entry
    except (ValueError, KeyError, TypeError):
        return False


def _finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
