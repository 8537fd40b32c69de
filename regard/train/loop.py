"""The training loop: from the first step to the last, evaluations and checkpoints between them, and nothing lost.

A run that is killed and resumed ends with the very same weights as one that was not.
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
from .average import mean
from .journal import Journal
from .learner import Learner
from .stop import Stop, Stopped

PARTS = 20  # of a run: where nothing else is said, it is evaluated after each
RESCUE = 300.0  # seconds without a checkpoint, after which there is one out of turn
SHARE = 4  # a run that is given minutes learns so many times as long as it is evaluated
SETBACKS = 5  # without a checkpoint between them, after which a run that goes bad is given up


class Progress(NamedTuple):
    """What a person watching wants to know."""

    step: int
    epoch: float
    loss: float
    lr: float
    speed: float  # tokens read per second, source and target, without padding
    elapsed: float  # seconds of training, over all resumptions
    left: float | None  # seconds
    done: float  # 0..1
    metrics: dict[str, float]  # of the last evaluation


class Trainer:
    """model, objective, feed: what learns, by what, from what.

    evaluate: the model -> metrics, "loss" among them; called between steps.
    run:      the folder that holds checkpoints and metrics; None: keep nothing, and end with the last weights.
    report:   called after every step; say: called with sentences that a person should read.
    patient:  go on although the run had stopped early.
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
        patient: bool = False,
    ):
        if not settings.bounded:
            raise UserError("a run needs an end: give steps, minutes or epochs")
        if settings.average and run is None:
            raise UserError("train.average is over checkpoints, so it needs a run folder")
        self.learner, self.settings = Learner(model, objective, feed, settings), settings
        self.run, self.evaluate, self.report, self.say, self.patient = run, evaluate, report, say, patient
        if settings.precision == "bfloat16" and not self.learner.casts:
            say(f"{self.learner.device.type} has no bfloat16, so this is float32")
        self.stop = Stop()
        self.journal: Journal | None = None
        self.best: dict[str, Any] | None = None  # its step and metrics
        self.metrics: dict[str, float] = {}
        self.waited = 0  # evaluations since the metric last improved
        self.pending = False  # an evaluation was due and could not be finished
        self.setbacks = 0
        self._before, self._begun, self._saved = 0.0, time.perf_counter(), time.perf_counter()
        self._looked = (0.0, 0.0)  # when the last evaluation ended, and how long it took

    @property
    def model(self) -> Model:
        return self.learner.model

    @property
    def step(self) -> int:
        return self.learner.step

    @property
    def elapsed(self) -> float:
        """Seconds of the run so far, over all resumptions."""
        return self._before + time.perf_counter() - self._begun

    @property
    def progress(self) -> float:
        """From 0 to 1 at the end, by whichever bound is nearest."""
        s = self.settings
        bounds = ((self.step, s.steps), (self.elapsed, 60 * s.minutes), (self.learner.epoch, s.epochs))
        return max(now / end for now, end in bounds if end)

    @property
    def finished(self) -> bool:
        return self.progress >= 1 or self._gave_up

    @property
    def _gave_up(self) -> bool:
        return bool(self.settings.patience) and self.waited >= self.settings.patience

    def train(self) -> dict[str, float]:
        """Until the end. The metrics of the model that it ends with. When asked to stop, KeyboardInterrupt comes once
        all is saved."""
        with checkpoint.locked(self.run) if self.run else nullcontext(), self.stop.listening():
            try:
                self._resume()
                over = self.finished
                if self.pending:
                    self._keep(due=True, save=over or self._divides(self.settings.save_steps, True))
                    over = over or self._gave_up
                while not over and not self.stop.asked:
                    over = self._round()
                if self.pending or (self.stop.asked and not over):
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
                    self.journal.drop()
        return self.metrics

    def _round(self) -> bool:
        """One step and what comes after it. Whether it was the last."""
        part = int(PARTS * self.progress)
        if not self.learner.advance(self._rate):
            self._go_back(f"the loss was not finite at step {self.step + 1}")
            return False
        if self.run is None:
            self.setbacks = 0
        progress = self.progress
        over = progress >= 1
        due = over or self._divides(self.settings.eval_steps, int(PARTS * progress) > part and self._affordable)
        save = over or self._divides(self.settings.save_steps, due)
        self._tell()
        if (due or save) and not self.learner.all_finite():
            self._go_back(f"the weights were not finite after step {self.step}")
            return False
        self._keep(due, save)
        if due and not self.pending and self.progress >= 1:  # if not before, the evaluation took what time was left
            over = True
            self.save()
        self.report(self._progress())
        return over or self._gave_up

    @property
    def _affordable(self) -> bool:
        """Of a run that is bounded by the clock alone, little time goes into evaluations."""
        s, (ended, taken) = self.settings, self._looked
        return bool(s.steps or s.epochs) or time.perf_counter() - ended >= SHARE * taken

    def _divides(self, every: int, otherwise: bool) -> bool:
        return self.step % every == 0 if every else otherwise

    def _rate(self) -> float:
        s = self.settings
        return s.lr * schedule.factor(s.schedule, self.step, s.warmup, self.progress, s.min_lr_ratio)

    def _tell(self) -> None:
        now = self.learner
        if self.journal:
            told = {"epoch": now.epoch, "loss": now.loss, "lr": now.lr, "tokens_per_second": now.speed}
            self.journal.step(now.step, **told, seconds=self.elapsed)

    def _progress(self) -> Progress:
        now, done = self.learner, min(self.progress, 1.0)
        left = self.elapsed * (1 - done) / done if done else None
        return Progress(now.step, now.epoch, now.loss, now.lr, now.speed, self.elapsed, left, done, self.metrics)

    def _keep(self, due: bool, save: bool) -> None:
        """due: evaluate; save: keep a checkpoint."""
        better = due and self._evaluate()
        late = time.perf_counter() - self._saved > RESCUE
        if not self.pending and (save or better or late):
            self.save(due=save)

    def _evaluate(self) -> bool:
        """Return whether this model is the best so far: the one with the better metric; of several with an equal
        metric the one with the lowest loss; of several with an equal loss, too, the latest.

        Patience counts evaluations in which the metric did not improve. A lower loss at an equal metric is kept, but
        does not reset it: who says `--metric exact --patience 5` wants to stop when exact match stands still."""
        if self.evaluate is None:
            return False
        begun = time.perf_counter()
        try:
            with self.learner.eval_mode(), self.stop.breakable():
                found = self.evaluate(self.model)
            self.pending = False
            self._looked = (time.perf_counter(), time.perf_counter() - begun)
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
        """A checkpoint of this moment, unless there is one. due: not out of turn."""
        if self.journal is None:
            return
        there = checkpoint.find_step(self.folder, self.step)
        if there is not None and not (due and checkpoint.is_extra(there)):
            return
        self.journal.flush()
        with self.learner.ema.inside():  # so that model.safetensors is what was evaluated
            tensors, numbers = self.learner.state()
            numbers |= {"elapsed": self.elapsed, "pending": self.pending}
            numbers |= {"best": self.best, "waited": self.waited, "metrics": self.metrics}
            checkpoint.write(self.folder, self.step, self.model, tensors, numbers, due)
        best = checkpoint.find_step(self.folder, self.best["step"]) if self.best else None
        checkpoint.prune(self.folder, max(self.settings.keep_checkpoints, self.settings.average), best)
        self._saved = time.perf_counter()
        if due:
            self.setbacks = 0

    def _resume(self) -> None:
        self._begun = self._saved = time.perf_counter()
        if self.run is None:
            return
        path, numbers, complaints = checkpoint.newest(self.folder)
        if path is None and complaints:
            raise UserError(f"{complaints[0]}, and no other in {short(self.folder)} is whole: begin a new run")
        if path is None:
            self.journal = Journal(self.run, 0)
            return self.save()
        for sentence, damaged in zip(complaints, reversed(checkpoint.newer_than(self.folder, path)), strict=True):
            self.say(f"{sentence}; it is set aside")
            checkpoint.set_aside(damaged)
        self._restore(path, numbers)
        with _whole(path):
            self.learner.seek(numbers["epoch"], numbers["taken"])
            self._before, self.pending = numbers["elapsed"], numbers["pending"]
        self.waited = 0 if self.patient else self.waited
        self.journal = Journal(self.run, self.step)
        if self.step:
            self.say(f"going on from step {self.step}")

    def _restore(self, path: Path, numbers: dict[str, Any]) -> None:
        """All but the place in the data and the time."""
        with _whole(path):
            self.learner.restore(checkpoint.read(path, self.model), numbers)
            self.best, self.waited, self.metrics = (numbers[name] for name in ("best", "waited", "metrics"))

    def _go_back(self, what: str) -> None:
        """Something is not finite: back to the last checkpoint that was due, and on with the data that comes next. Not
        to one out of turn, so that a run that was stopped or killed as well goes the same way."""
        self.setbacks += 1
        if self.setbacks > SETBACKS:
            raise UserError(
                f"{what}, and {SETBACKS} attempts before ended like this: lower train.lr or train.max_grad_norm, or "
                "look for what is strange in the data"
            )
        if self.journal is None:
            if not self.learner.all_finite():
                raise UserError(
                    f"{what}, and there is no run folder to go back to: lower train.lr or train.max_grad_norm"
                )
            return self.say(f"{what}: that batch is left out")
        path, numbers, _ = checkpoint.newest(self.folder, scheduled=True)
        if path is None:
            raise UserError(f"{what}, and there is no checkpoint to go back to")
        for later in checkpoint.newer_than(self.folder, path):
            checkpoint.remove(later)
        self._restore(path, numbers)
        self.journal.drop()
        self.journal = Journal(self.journal.run, self.step)
        self.say(f"{what}: back to step {self.step}, without the batches that led there")

    def _pause(self) -> None:
        self.save(due=False)
        if self.run:
            self.say(f"stopped after step {self.step}; go on with: regard train --resume {short(self.run)}")
        raise KeyboardInterrupt

    def _finish(self) -> None:
        """The model becomes what the run is for: the mean of the last checkpoints, the best one, or the last."""
        if self.journal is None:
            return self.learner.ema.swap()
        best = self.best["step"] if self.best else None
        paths = checkpoint.final_checkpoints(self.folder, self.settings.average, best, self.say)
        final = checkpoint.save_final(self.journal.run, mean([path / checkpoint.MODEL for path in paths]))
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
def _whole(path: Path) -> Iterator[None]:
    """Refuse a checkpoint that lacks what is asked of it inside."""
    try:
        yield
    except KeyError as error:
        raise UserError(f"{short(path)} does not fit this run: it has no {error}") from None


def _rank(metric: str, found: dict[str, float]) -> tuple[float, float]:
    """Return what evaluations are compared by, the higher the better: the metric, then the negative loss."""

    def value(name: str) -> float:
        one = found.get(name, math.nan)
        return -math.inf if math.isnan(one) else one if name in HIGHER_IS_BETTER else -one

    return value(metric), value("loss")
