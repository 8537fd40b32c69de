"""Run optimizer steps, and save and restore all state that the next step depends on.

That state is the weights, the optimizer, the moving average, the random number generators, the position in the data and
what the objective carries from batch to batch: the same state leads to the same steps.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.core import Model, Norm, Stack, Tap, UserError, losses
from regard.data.batches import Batch, ResumableBatches
from regard.machine import forks
from regard.native.build import load_kernels
from regard.ops.accumulate import accumulate_into
from regard.parts.objectives.objective import Objective, StatefulObjective
from regard.runs.settings import Settings

from .average import ExponentialMovingAverage
from .gradients import Gradients
from .optimizer import Optimizer
from .workers import Workers

# On a CPU, a batch is split into micro-batches of so many positions times the model's width squared, which keeps their
# activations in the cache, but of at least so many positions, which keeps matrix products large.
MICRO_BATCH_WORK, MIN_MICRO_BATCH = 1 << 25, 512
MIN_WORK_FOR_WORKERS = 3 << 30  # positions of a step times trainable weights from which on every core is a worker


class DataPosition(NamedTuple):
    """How far a run is in its data."""

    epoch: int
    taken: int  # batches of this epoch that were used
    size: int  # batches in this epoch; 1 until the first one was used

    @classmethod
    def of(cls, feed: ResumableBatches) -> DataPosition:
        return cls(feed.epoch, feed.index, feed.size if feed.index else 1)  # to know the size, the epoch is planned


class Learner:
    """A model with its optimizer and its position in the data."""

    def __init__(self, model: Model, objective: Objective, feed: ResumableBatches, settings: Settings):
        self.model, self.objective, self.feed, self.settings = model, objective, feed, settings
        self.device = next(model.parameters()).device
        if self.device.type == "cpu":
            load_kernels()  # before the workers are forked, so that they have them
        self.optimizer = Optimizer(model, settings)
        self.gradients = Gradients(self.optimizer.parameters)
        self.ema = ExponentialMovingAverage(self.optimizer.parameters, settings.ema)
        for module in model.modules():
            if isinstance(module, Stack):
                module.gradient_checkpointing = settings.gradient_checkpointing
        self.uses_bfloat16 = settings.precision == "bfloat16" and has_bfloat16(self.device)
        taps = [name for name, module in model.named_modules() if isinstance(module, Tap)]
        self._has_extra_losses = any(name.rpartition(".")[2] == "loss" for name in taps)
        self._uses_micro_batches = (
            self.device.type == "cpu" and getattr(objective, "splits", False) and not self._has_extra_losses
        )
        batch_norms = any(isinstance(m, Norm) and [*m.buffers()] for m in model.modules())  # they need the whole batch
        self._uses_micro_batches &= not batch_norms
        self._micro_batch = max(MICRO_BATCH_WORK // model.width**2, MIN_MICRO_BATCH) if self._uses_micro_batches else 0
        self._workers: Workers | None = None
        self._parameter_count = sum(p.numel() for p in self.optimizer.parameters)
        self.place = DataPosition.of(feed)
        self._prefetched: tuple[list[Batch], DataPosition, int] | None = None
        self.step, self.tokens, self.lr, self.loss = 0, 0, 0.0, math.nan
        self.recent: deque[tuple[float, int]] = deque(maxlen=50)  # seconds and input tokens of steps

    def advance(self, rate: Callable[[], float], progress: float = 0.0) -> bool:
        """Take one optimizer step and return whether it was taken: where the loss or the gradient is not finite, no
        weight changes. rate: returns the learning rate; it is called after the step was counted. progress: the share of
        the training that is done."""
        begun = time.perf_counter()
        if not self.model.training:
            self.model.train()
        batches, self.place, inputs = self._prefetched or self._next_batches()
        batches = [batch._replace(progress=min(progress, 1.0)) for batch in batches]
        count = sum(batch.count for batch in batches)
        self.gradients.zero()
        sums = self._accumulate_gradients(batches, count)
        self.gradients.drop_unused()
        norm = self.optimizer.norm()
        self._prefetched = self._next_batches()  # while the device is still busy
        *nll, grad_norm = torch.stack([*sums, norm.to(sums[0])]).tolist()  # the only synchronization in a step
        if not math.isfinite(sum(nll)) or not math.isfinite(grad_norm):
            if isinstance(self.objective, StatefulObjective):
                self.objective.restore({})
            return False
        self.step, self.tokens, self.loss = self.step + 1, self.tokens + count, sum(nll) / count
        self.lr = rate()
        self.optimizer.step(self.lr, grad_norm)
        self.ema.update(self.step)
        self.recent.append((time.perf_counter() - begun, inputs))
        return True

    def _next_batches(self) -> tuple[list[Batch], DataPosition, int]:
        """Return the batches of the next step, the position in the data after them, and the number of input tokens."""
        batches = [next(self.feed) for _ in range(self.settings.gradient_accumulation)]
        inputs = sum(batch.input_tokens for batch in batches)  # counted on the CPU, without synchronizing with a device
        return [batch.to(self.device) for batch in batches], DataPosition.of(self.feed), inputs

    def _accumulate_gradients(self, batches: list[Batch], count: int) -> list[Tensor]:
        """Add the gradients of a step over `count` target tokens. Return sums of -log p."""
        cores = torch.get_num_threads() if self._uses_micro_batches and forks(self.device) else 1
        if cores < 2 or self._parameter_count * sum(batch.positions for batch in batches) < MIN_WORK_FOR_WORKERS:
            return self._backward_all(
                [p for b in batches for p in (b.split(self._micro_batch) if self._uses_micro_batches else [b])], count
            )
        if self._workers is None or len(self._workers) != cores - 1:
            self._workers = Workers(self._backward_all, self.gradients, cores - 1)
        parts = [part for batch in batches for part in batch.split(self._micro_batch, cores)]
        torch.set_num_threads(1)
        try:
            self._workers.scatter([parts[i::cores] for i in range(1, cores)], count)
            sums = self._backward_all(parts[::cores], count)
            return sums + [sums[0].new_tensor(nll) for nll in self._workers.gather()]
        finally:
            torch.set_num_threads(cores)

    def _backward_all(self, batches: Sequence[Batch], count: int) -> list[Tensor]:
        return [self._backward(batch, count) for batch in batches]

    def _backward(self, batch: Batch, count: int) -> Tensor:
        """Add the gradient of one batch of a step over `count` target tokens. Return the batch's sum of -log p."""
        extra_losses = losses(self.model) if self._has_extra_losses else nullcontext(lambda: 0.0)
        with extra_losses as extra, accumulate_into(self.gradients, 1 / count):  # open until layers were recomputed
            with self._autocast():
                result = self.objective(self.model, batch)
                loss = result.loss / count + extra() * (batch.count / count)
            loss.backward()
        return result.nll.detach()

    def _autocast(self) -> AbstractContextManager:
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self.uses_bfloat16 else nullcontext()

    @property
    def epoch(self) -> float:
        return self.place.epoch + self.place.taken / self.place.size

    @property
    def speed(self) -> float:
        """Return the input tokens per second, source and target, over the last steps."""
        seconds, tokens = (sum(column) for column in zip(*self.recent, strict=True)) if self.recent else (0.0, 0)
        return tokens / seconds if seconds else 0.0

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Inside the `with` block, the model is in eval mode with its averaged weights, where there is an average.
        Training then continues as if nothing had happened."""
        before = self.rng_state()
        try:
            with self.ema.swapped_in(), torch.no_grad():
                self.model.eval()
                yield
        finally:
            self.set_rng_state(before)

    def all_finite(self) -> bool:
        """Return whether all weights and running statistics are finite."""
        tensors = [t for t in (*self.model.parameters(), *self.model.buffers()) if t.is_floating_point()]
        return bool(torch.stack([t.isfinite().all() for t in tensors]).all())

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all state but the model's, as tensors and as numbers. Where there is an average of the weights, it
        must be swapped into the model when this is called."""
        tensors = {f"optimizer/{name}": t for name, t in self.optimizer.state().items()} | self.rng_state()
        tensors |= {f"own/{i}": t for i, t in enumerate(self.ema.values)}
        if isinstance(self.objective, StatefulObjective):
            tensors |= {f"objective/{name}": t for name, t in self.objective.state().items()}
        numbers = {"optimizer": self.settings.optimizer, "step": self.step, "tokens": self.tokens}
        return tensors, numbers | {"epoch": self.place.epoch, "taken": self.place.taken}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Restore what `state` returned, into a model as it was then. The position in the data is left to `seek`."""
        if numbers["optimizer"] != self.settings.optimizer:
            raise UserError(f"this run has '{numbers['optimizer']}' as optimizer, not '{self.settings.optimizer}'")
        self.optimizer.restore(_with_prefix("optimizer/", tensors))
        if isinstance(self.objective, StatefulObjective):
            self.objective.restore(_with_prefix("objective/", tensors))
        for i, value in enumerate(self.ema.values):
            value.copy_(tensors[f"own/{i}"])
        self.ema.swap()
        self.set_rng_state(tensors)
        self.step, self.tokens = numbers["step"], numbers["tokens"]

    def seek(self, epoch: int, taken: int) -> None:
        """Continue with the data after so many batches of an epoch."""
        self.feed = ResumableBatches(self.feed.batches, epoch, taken)
        self.place, self._prefetched = DataPosition.of(self.feed), None

    def rng_state(self) -> dict[str, Tensor]:
        """Return the states of the random number generators."""
        states = {"random/cpu": torch.get_rng_state()}
        if self.device.type != "cpu":
            states["random/device"] = torch.get_device_module(self.device).get_rng_state()
        return states

    def set_rng_state(self, states: dict[str, Tensor]) -> None:
        torch.set_rng_state(states["random/cpu"])
        if "random/device" in states and self.device.type != "cpu":
            torch.get_device_module(self.device).set_rng_state(states["random/device"])


def _with_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, by their names without it."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def has_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.amp.is_autocast_available(device.type)
