"""The training loop: optimizer steps, evaluations, checkpoints, and resuming from them.

A run that is killed and resumed ends with exactly the same weights as one that was not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_model

from regard.core import Model, UserError
from regard.data.batches import ResumableBatches
from regard.errors import short
from regard.machine import HelperLost
from regard.metrics import HIGHER_IS_BETTER
from regard.parts.objectives.objective import Objective
from regard.runs import checkpoint
from regard.runs.settings import Settings

from . import schedule
from .average import average_checkpoints
from .journal import Journal
from .learner import Learner
from .stop import Stop, Stopped

DEFAULT_EVALUATIONS = 20  # in a run without eval_steps, evenly spaced
MAX_UNSAVED_SECONDS = 300.0  # after this long without a checkpoint, an extra one is saved
MIN_TRAIN_TO_EVAL_RATIO = 4  # a run bounded by minutes alone trains at least this many times as long as it evaluates
MAX_ROLLBACKS = 5  # in a row without a new checkpoint, after which training is given up


class Progress(NamedTuple):
    """What is reported after every step."""

    step: int
    epoch: float
    loss: float
    lr: float
    speed: float  # input tokens per second, source and target, without padding
    elapsed: float  # seconds of training, over all resumptions
    left: float | None  # seconds
    done: float  # 0..1
    metrics: dict[str, float]  # of the last evaluation


class Trainer:
    """Trains a model on the batches of a feed.

    run:            folder for checkpoints and metrics; None: save nothing, and end with the last weights.
    evaluate:       takes the model and returns metrics, "loss" among them; called between steps.
    report:         called after every step.
    say:            called with messages for the user.
    reset_patience: continue although the run had stopped early.
    """

    def __init__(
        self,
        model: Model,
        objective: Objective,
        feed: ResumableBatches,
        settings: Settings,
        run: Path | None = None,
        evaluate: Callable[[Model], dict[str, float]] | None = None,
        report: Callable[[Progress], None] = lambda progress: None,
        say: Callable[[str], None] = lambda sentence: None,
        reset_patience: bool = False,
    ):
        if not settings.bounded:
            raise UserError("a run needs an end: give steps, minutes or epochs")
        if settings.average and run is None:
            raise UserError("train.average is over checkpoints, so it needs a run folder")
        self.learner, self.settings = Learner(model, objective, feed, settings), settings
        self.run, self.evaluate, self.report, self.say, self.reset_patience = run, evaluate, report, say, reset_patience
        if settings.precision == "bfloat16" and not self.learner.uses_bfloat16:
            say(f"{self.learner.device.type} has no bfloat16, so this is float32")
        self.stop = Stop()
        self.journal: Journal | None = None
        self.best: dict[str, Any] | None = None  # its step and metrics
        self.metrics: dict[str, float] = {}
        self.waited = 0  # evaluations since the metric last improved
        self.pending = False  # an evaluation was due and could not be finished
        self.rollbacks = 0
        self._elapsed_before, self._started_at, self._saved_at = 0.0, time.perf_counter(), time.perf_counter()
        self._last_evaluation = (0.0, 0.0)  # when it ended, and how many seconds it took

    @property
    def model(self) -> Model:
        return self.learner.model

    @property
    def step(self) -> int:
        return self.learner.step

    @property
    def elapsed(self) -> float:
        """Return the seconds of the run so far, over all resumptions."""
        return self._elapsed_before + time.perf_counter() - self._started_at

    @property
    def progress(self) -> float:
        """Return how far the run is, from 0 to 1 at the end, by whichever bound is nearest."""
        s = self.settings
        bounds = ((self.step, s.steps), (self.elapsed, 60 * s.minutes), (self.learner.epoch, s.epochs))
        return max(now / end for now, end in bounds if end)

    @property
    def finished(self) -> bool:
        return self.progress >= 1 or self._out_of_patience

    @property
    def _out_of_patience(self) -> bool:
        return bool(self.settings.patience) and self.waited >= self.settings.patience

    def train(self) -> dict[str, float]:
        """Train to the end and return the metrics of the final model. After a signal, save and raise
        KeyboardInterrupt."""
        with checkpoint.locked(self.run) if self.run else nullcontext(), self.stop.catch_signals():
            try:
                self._resume()
                over = self.finished
                if self.pending:
                    self._evaluate_and_save(due=True, save=over or self._is_due(self.settings.save_steps, True))
                    over = over or self._out_of_patience
                while not over and not self.stop.requested:
                    over = self._step()
                if self.pending or (self.stop.requested and not over):
                    self._pause()
                self._finish()
            except HelperLost as error:
                if self.run is None:
                    raise
                raise UserError(
                    f"{error}; go on from the last checkpoint: regard train --resume {short(self.run)}"
                ) from None
            finally:
                if self.journal:
                    self.journal.close()
        return self.metrics

    def _step(self) -> bool:
        """Take one step, with the evaluation and the checkpoint that are due after it. Return whether it was the
        last."""
        part = int(DEFAULT_EVALUATIONS * self.progress)
        if not self.learner.advance(self._learning_rate, self.progress):
            self._roll_back(f"the loss was not finite at step {self.step + 1}")
            return False
        if self.run is None:
            self.rollbacks = 0
        progress = self.progress
        over = progress >= 1
        due = over or self._is_due(
            self.settings.eval_steps, int(DEFAULT_EVALUATIONS * progress) > part and self._can_afford_evaluation
        )
        save = over or self._is_due(self.settings.save_steps, due)
        self._log_step()
        if (due or save) and not self.learner.all_finite():
            self._roll_back(f"the weights were not finite after step {self.step}")
            return False
        self._evaluate_and_save(due, save)
        if due and not self.pending and self.progress >= 1:  # where the evaluation took the rest of the time
            over = True
            self.save()
        self.report(self._progress())
        return over or self._out_of_patience

    @property
    def _can_afford_evaluation(self) -> bool:
        """Return whether an evaluation may begin: in a run that is bounded by minutes alone, evaluations take little of
        the time."""
        s, (ended, taken) = self.settings, self._last_evaluation
        return bool(s.steps or s.epochs) or time.perf_counter() - ended >= MIN_TRAIN_TO_EVAL_RATIO * taken

    def _is_due(self, every: int, otherwise: bool) -> bool:
        return self.step % every == 0 if every else otherwise

    def _learning_rate(self) -> float:
        s = self.settings
        return s.lr * schedule.factor(s.schedule, self.step, s.warmup, self.progress, s.min_lr_ratio)

    def _log_step(self) -> None:
        now = self.learner
        if self.journal:
            values = {"epoch": now.epoch, "loss": now.loss, "lr": now.lr, "tokens_per_second": now.speed}
            self.journal.step(now.step, **values, seconds=self.elapsed)

    def _progress(self) -> Progress:
        now, done = self.learner, min(self.progress, 1.0)
        left = self.elapsed * (1 - done) / done if done else None
        return Progress(now.step, now.epoch, now.loss, now.lr, now.speed, self.elapsed, left, done, self.metrics)

    def _evaluate_and_save(self, due: bool, save: bool) -> None:
        """Evaluate where that is due, and save a checkpoint where one is asked for, the model is the best so far, or
        the last checkpoint is too old."""
        better = due and self._evaluate()
        late = time.perf_counter() - self._saved_at > MAX_UNSAVED_SECONDS
        if not self.pending and (save or better or late):
            self.save(due=save)

    def _evaluate(self) -> bool:
        """Evaluate the model and return whether it is the best so far: by the metric, at an equal metric by the lowest
        loss, and at an equal loss by the latest step.

        Patience counts evaluations in which the metric did not improve. A lower loss at an equal metric makes a new
        best model but does not reset patience: `--metric exact --patience 5` stops when exact match stands still."""
        if self.evaluate is None:
            return False
        begun = time.perf_counter()
        try:
            with self.learner.eval_mode(), self.stop.interruptible():
                found = self.evaluate(self.model)
            self.pending = False
            self._last_evaluation = (time.perf_counter(), time.perf_counter() - begun)
        except Stopped:
            self.pending = True
            return False
        name = self.settings.metric
        if name not in found:
            raise UserError(f"train.metric '{name}' is not measured here (measured: {', '.join(found)})")
        self.metrics = {**found, "step": self.step}
        if self.journal:
            self.journal.evaluation(self.step, self.elapsed, found)
        rank, before = _rank(name, found), None if self.best is None else _rank(name, self.best["metrics"])
        self.waited = 0 if before is None or rank[0] > before[0] else self.waited + 1
        best = before is None or rank >= before
        if best:
            self.best = {"step": self.step, "metrics": found}
        return best

    @property
    def folder(self) -> Path:
        assert self.run is not None
        return self.run / "checkpoints"

    def save(self, due: bool = True) -> None:
        """Save a checkpoint of this step, unless there is one. due: a regular checkpoint, not an extra one."""
        if self.journal is None:
            return
        there = checkpoint.find_step(self.folder, self.step)
        if there is not None and not (due and checkpoint.is_extra(there)):
            return
        self.journal.flush()
        with self.learner.ema.swapped_in():  # so that model.safetensors is what was evaluated
            tensors, numbers = self.learner.state()
            numbers |= {"elapsed": self.elapsed, "pending": self.pending}
            numbers |= {"best": self.best, "waited": self.waited, "metrics": self.metrics}
            checkpoint.write(self.folder, self.step, self.model, tensors, numbers, due)
        best = checkpoint.find_step(self.folder, self.best["step"]) if self.best else None
        checkpoint.prune(self.folder, max(self.settings.keep_checkpoints, self.settings.average), best)
        self._saved_at = time.perf_counter()
        if due:
            self.rollbacks = 0

    def _resume(self) -> None:
        self._started_at = self._saved_at = time.perf_counter()
        if self.run is None:
            return
        path, numbers, complaints = checkpoint.newest(self.folder)
        if path is None and complaints:
            raise UserError(f"{complaints[0]}, and no other in {short(self.folder)} is intact: begin a new run")
        if path is None:
            self.journal = Journal(self.run, 0)
            return self.save()
        for sentence, damaged in zip(complaints, reversed(checkpoint.newer_than(self.folder, path)), strict=True):
            self.say(f"{sentence}; it is set aside")
            checkpoint.set_aside(damaged)
        self._restore(path, numbers)
        with _must_fit(path):
            self.learner.seek(numbers["epoch"], numbers["taken"])
            self._elapsed_before, self.pending = numbers["elapsed"], numbers["pending"]
        self.waited = 0 if self.reset_patience else self.waited
        self.journal = Journal(self.run, self.step)
        if self.step:
            self.say(f"going on from step {self.step}")

    def _restore(self, path: Path, numbers: dict[str, Any]) -> None:
        """Restore all state but the position in the data and the elapsed time."""
        with _must_fit(path):
            self.learner.restore(checkpoint.read(path, self.model), numbers)
            self.best, self.waited, self.metrics = (numbers[name] for name in ("best", "waited", "metrics"))

    def _roll_back(self, what: str) -> None:
        """After a loss or weight that is not finite, return to the last regular checkpoint and continue with the data
        that comes next. Extra checkpoints are not used, so that a run that was also interrupted does the same."""
        self.rollbacks += 1
        if self.rollbacks > MAX_ROLLBACKS:
            raise UserError(
                f"{what}, as in {MAX_ROLLBACKS} attempts before: lower train.lr or train.max_grad_norm, or look for "
                "unusual examples in the data"
            )
        if self.journal is None:
            if not self.learner.all_finite():
                raise UserError(
                    f"{what}, and there is no run folder to go back to: lower train.lr or train.max_grad_norm"
                )
            return self.say(f"{what}: that batch is skipped")
        path, numbers, _ = checkpoint.newest(self.folder, scheduled=True)
        if path is None:
            raise UserError(f"{what}, and there is no checkpoint to go back to")
        for later in checkpoint.newer_than(self.folder, path):
            checkpoint.remove(later)
        self._restore(path, numbers)
        self.journal.close()
        self.journal = Journal(self.journal.run, self.step)
        self.say(f"{what}: back to step {self.step}, without the batches that led there")

    def _pause(self) -> None:
        self.save(due=False)
        if self.run:
            self.say(f"stopped after step {self.step}; go on with: regard train --resume {short(self.run)}")
        raise KeyboardInterrupt

    def _finish(self) -> None:
        """Load the final weights into the model: the mean of the last checkpoints, the best one, or the last one."""
        if self.journal is None:
            return self.learner.ema.swap()
        best = self.best["step"] if self.best else None
        paths = checkpoint.final_checkpoints(self.folder, self.settings.average, best, self.say)
        final = checkpoint.save_final(
            self.journal.run, average_checkpoints([path / checkpoint.MODEL for path in paths])
        )
        load_model(self.model, str(final))
        if self.best and self.evaluate:
            step, found = self.best["step"], self.best["metrics"]
            if self.settings.average:
                self.model.eval()
                with torch.no_grad():
                    step, found = self.step, self.evaluate(self.model)
            self.metrics = {**found, "step": step}
            self.journal.evaluation(self.step, self.elapsed, found, "final")
        self.journal.flush()


@contextmanager
def _must_fit(path: Path) -> Iterator[None]:
    """Refuse a checkpoint that lacks an entry which is read inside the `with` block."""
    try:
        yield
    except KeyError as error:
        raise UserError(f"{short(path)} does not fit this run: it has no {error}") from None


def _rank(metric: str, found: dict[str, float]) -> tuple[float, float]:
    """Return the key by which evaluations are compared, the higher the better: the metric, then the negative loss."""

    def value(name: str) -> float:
        one = found.get(name, math.nan)
        return -math.inf if math.isnan(one) else one if name in HIGHER_IS_BETTER else -one

    return value(metric), value("loss")
