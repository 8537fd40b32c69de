"""The schema of a recipe's [train]: everything about training that is not the model."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from regard.core import UserError
from regard.errors import nearest
from regard.schema import check_arguments

OPTIMIZERS = ("adam", "adamw", "muon", "adafactor", "sgd")
SCHEDULES = ("inverse_sqrt", "cosine", "linear", "constant")
FREEZE = ("embed", "body")
BOUNDS = ("steps", "minutes", "epochs")
POSITIVE = ("batch_tokens", "context_length", "gradient_accumulation", "keep_checkpoints")
SHARES = ("label_smoothing", "ema", "beta1", "beta2")  # from 0 to below 1


@dataclass(frozen=True)
class Settings:
    """The settings of a recipe's [train].

    batch_tokens: the tokens of a batch, padding included, the longer side counted.
    batch_size: the sequences of a batch. It replaces `batch_tokens` for plain text, pictures and recordings; for other
        data it is an upper bound besides `batch_tokens`; 0 leaves the choice to `batch_tokens`.
    context_length: the positions of a training sequence of plain text.
    optimizer: adam, adamw, muon (Muon for matrices, AdamW for the rest), adafactor or sgd.
    lr: the peak learning rate.
    schedule: how the learning rate moves after warm-up: inverse_sqrt, cosine, linear or constant.
    warmup: the steps in which the rate rises to its peak, at most half of the run, also with --as-published.
    min_lr_ratio: the share of the peak rate that is left at the end of a cosine or linear schedule.
    beta1: the decay of Adam's and AdamW's mean of gradients, and the momentum of sgd.
    beta2: the decay of Adam's and AdamW's mean of squared gradients.
    eps: the number that Adam and AdamW add to the root of that mean.
    weight_decay: the weight decay of matrices, times the rate; with adam and sgd, an L2 penalty. Vectors do not decay.
    layer_decay: the rate of each layer as a share of that of the layer above it, embeddings lowest; 1 for all alike.
    head_lr: the rate of the head as a multiple of `lr`.
    freeze: the number of lowest layers that are frozen, embeddings included; or embed; or body, all but the head.
    max_grad_norm: the norm to which gradients are clipped; 0 for no clipping.
    gradient_accumulation: the batches of one optimizer step.
    label_smoothing: the probability that is spread over all tokens or labels.
    gradient_checkpointing: recompute layers in the backward pass to save memory.
    precision: float32, or bfloat16 where the device has it.
    average: the final model is the mean of this many last checkpoints (those of `save_steps`); 0 takes the best
        checkpoint; 1 takes the last, which is better where the rate falls to zero.
    ema: the decay of an exponential moving average of the weights, which is then evaluated and kept; 0 for none.
    steps: the steps of the run. The first of steps, minutes and epochs to be reached ends it.
    minutes: the minutes of the run by the clock, evaluations included, added up over all resumptions.
    epochs: the passes over the data.
    eval_steps: the steps between evaluations on the dev set; 0 for every twentieth of the run. Where minutes alone
        bound the run, evaluations take at most a fifth of it.
    save_steps: the steps between checkpoints; 0 for every evaluation. A new best model is saved at once, and after five
        minutes without a checkpoint there is an additional one, which is not averaged.
    keep_checkpoints: the number of checkpoints that are kept besides the best.
    metric: what decides the best model and early stopping: loss, or a metric that is measured by decoding, such as
        bleu. Where none is given, tasks that are answered in labels or numbers take accuracy, tag_accuracy or
        spearman. Ties go to the lower loss, then to the later checkpoint.
    patience: the evaluations without a better metric before the run stops; 0 for never. A lower loss at the same metric
        is no improvement.
    seed: the seed of everything random.
    """

    batch_tokens: int = 4096
    batch_size: int = 0
    context_length: int = 256
    optimizer: str = "adam"
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
    min_lr_ratio: float = 0.0
    max_grad_norm: float = 1.0
    gradient_accumulation: int = 1
    label_smoothing: float = 0.0
    gradient_checkpointing: bool = False
    precision: str = "float32"
    average: int = 0
    ema: float = 0.0
    steps: int = 0
    minutes: float = 0.0
    epochs: float = 0.0
    eval_steps: int = 0
    save_steps: int = 0
    keep_checkpoints: int = 2
    metric: str = "loss"
    patience: int = 0
    seed: int = 1

    def __post_init__(self) -> None:
        for name, known in (
            ("optimizer", OPTIMIZERS),
            ("schedule", SCHEDULES),
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
        if self.min_lr_ratio > 1:
            raise UserError(f"train.min_lr_ratio is a share of the peak, from 0 to 1, not {self.min_lr_ratio}")

    @classmethod
    def read(cls, table: dict[str, Any]) -> Settings:
        """Return the settings in a recipe's [train]; unknown keys are refused."""
        return cls(**check_arguments(cls, table, {}, "train"))

    @property
    def bounded(self) -> bool:
        return any(getattr(self, name) for name in BOUNDS)

    def until(self, bounds: dict[str, float]) -> Settings:
        """Return a copy that ends by other bounds, some of steps, minutes and epochs; the old bounds are dropped."""
        for name in bounds:
            if name not in BOUNDS:
                raise UserError(f"the end of a run is given in {', '.join(BOUNDS)}, not in '{name}'")
        checked = check_arguments(type(self), bounds, {}, "train")
        return replace(self, **{name: checked.get(name, 0) for name in BOUNDS})

    def table(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}
