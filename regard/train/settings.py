"""The schema of a recipe's [train]: everything about training that is not the model."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from regard.core import UserError
from regard.core.errors import nearest
from regard.core.parts import fit

from . import optimiser, schedule

FREEZE = ("embed", "body")
BOUNDS = ("steps", "minutes", "epochs")
POSITIVE = ("batch", "context", "accumulate", "keep")
SHARES = ("smoothing", "ema", "beta1", "beta2")  # from 0 to below 1


@dataclass(frozen=True)
class Settings:
    """batch:      tokens in a batch, padding included, the longer side counted.
    rows:          sequences in a batch. Of plain text, pictures and recordings, instead of `batch`; of other data, as
                   many at the most as `batch` allows; 0: `batch` alone decides.
    context:       positions of a training sequence of plain text.
    optimiser:     adam, adamw, muon (matrices by Muon, the rest by AdamW), adafactor, sgd.
    lr:            the peak learning rate.
    schedule:      how the rate moves after warm-up: inverse_sqrt, cosine, linear, constant.
    warmup:        steps in which the rate goes up to its peak; half of the run at the most, with --as-published, too.
    floor:         the share of the peak that is left at the end, of cosine and linear schedules.
    beta1:         decay of the mean of gradients, of Adam and AdamW; the momentum of sgd.
    beta2:         decay of the mean of squared gradients, of Adam and AdamW.
    eps:           what is added to the root of that mean, of Adam and AdamW.
    weight_decay:  how much matrices shrink at every step, times the rate; with adam and sgd, a part of the gradient.
                   Vectors do not decay.
    layer_decay:   every layer learns at this share of the rate of the one above it, embeddings at the least; 1: all at
                   the same.
    head_lr:       the head learns at so many times the rate.
    freeze:        so many of the lowest layers do not learn, embeddings included; or embed, or body: all but the head.
    clip:          largest gradient norm, 0 for none.
    accumulate:    batches per step.
    smoothing:     label smoothing.
    checkpointing: recompute layers in the backward pass, to save memory.
    precision:     float32, or bfloat16 where the device has it.
    average:       the final model is the mean of so many last checkpoints, those of `save`; 0: the best one alone.
                   Of a run whose rate goes down to nothing the last is better than one that was lucky on dev: 1.
    ema:           decay of an exponential moving average of the weights, which is then what is evaluated and kept;
                   0 for none.
    steps:         steps of the run. Whichever of steps, minutes and epochs comes first ends it.
    minutes:       minutes of the run by the clock, evaluations among them, counted over all resumptions.
    epochs:        times that the data is gone through.
    evaluate:      steps between evaluations on the dev set; 0: at every twentieth of the run, so that a run of two
                   hours is looked at every 6 minutes; in a run of minutes alone, they take a fifth of it at the most.
    save:          steps between checkpoints; 0: at every evaluation. A new best is kept at once, and when five minutes
                   have passed without a checkpoint there is one more, which is not averaged.
    keep:          checkpoints that stay, besides the best.
    metric:        what `best` and early stopping look at: loss, or a metric that is measured by decoding, such as bleu.
                   Where none is given, tasks that are answered in labels or numbers take their own: accuracy,
                   tag_accuracy or spearman. Of checkpoints that tie, the one with the lowest loss is the best, then the
                   latest.
    patience:      evaluations without improvement of the metric before stopping; 0: never. A lower loss at the same
                   metric is no improvement.
    seed:          of everything random.
    """

    batch: int = 4096
    rows: int = 0
    context: int = 256
    optimiser: str = "adam"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-9
    weight_decay: float = 0.0
    layer_decay: float = 1.0
    head_lr: float = 1.0
    freeze: int | str = 0
    schedule: str = "inverse_sqrt"
    warmup: int = 1000
    floor: float = 0.0
    clip: float = 1.0
    accumulate: int = 1
    smoothing: float = 0.0
    checkpointing: bool = False
    precision: str = "float32"
    average: int = 0
    ema: float = 0.0
    steps: int = 0
    minutes: float = 0.0
    epochs: float = 0.0
    evaluate: int = 0
    save: int = 0
    keep: int = 2
    metric: str = "loss"
    patience: int = 0
    seed: int = 1

    def __post_init__(self) -> None:
        for name, known in (
            ("optimiser", optimiser.KINDS),
            ("schedule", schedule.KINDS),
            ("precision", ("float32", "bfloat16")),
        ):
            given = getattr(self, name)
            if given not in known:
                raise UserError(f"train.{name} '{given}' is unknown{nearest(given, known)}")
        for name, value in self.table().items():
            if isinstance(value, str | bool):
                continue
            if not math.isfinite(value) or value < 0:
                raise UserError(f"train.{name} must not be negative, nor without end, and is {value}")
            if name in POSITIVE and value < 1:
                raise UserError(f"train.{name} must be at least 1, not {value}")
            if name in SHARES and value >= 1:
                raise UserError(f"train.{name} must be from 0 to below 1, not {value}")
        if isinstance(self.freeze, str) and self.freeze not in FREEZE:
            raise UserError(f"train.freeze '{self.freeze}' is unknown: give a number of layers, {' or '.join(FREEZE)}")
        if not 0 < self.layer_decay <= 1:
            raise UserError(f"train.layer_decay must be above 0 and at most 1, not {self.layer_decay}")
        if self.floor > 1:
            raise UserError(f"train.floor is a share of the peak, from 0 to 1, not {self.floor}")

    @classmethod
    def read(cls, table: dict[str, Any]) -> Settings:
        """From a recipe's [train], unknown keys refused."""
        return cls(**fit(cls, table, {}, "train"))

    @property
    def bounded(self) -> bool:
        return any(getattr(self, name) for name in BOUNDS)

    def until(self, bounds: dict[str, float]) -> Settings:
        """The same with another end, given as some of steps, minutes and epochs; the old end no longer counts."""
        for name in bounds:
            if name not in BOUNDS:
                raise UserError(f"the end of a run is given in {', '.join(BOUNDS)}, not in '{name}'")
        checked = fit(type(self), bounds, {}, "train")
        return replace(self, **{name: checked.get(name, 0) for name in BOUNDS})

    def table(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}
