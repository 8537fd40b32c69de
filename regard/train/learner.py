"""One step after the other: batches in, gradients, a better model out; and the whole of what the next step depends on.

That is weights, optimizer, averages, random numbers, the place in the data and what the objective carries from batch to
batch: from them, the same steps follow.
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

PART, FEWEST = 1 << 25, 512  # positions that go through a model together on a CPU, times its width squared; and
# at the least: what they leave behind stays small, and products stay large
SPREAD = 3 << 30  # positions of a step times weights that learn, from which on every core takes a share of it


class Place(NamedTuple):
    """Where a run stands in its data."""

    epoch: int
    taken: int  # batches of this epoch
    size: int  # of all batches of this epoch, once one was taken

    @classmethod
    def of(cls, feed: ResumableBatches) -> Place:
        return cls(feed.epoch, feed.index, feed.size if feed.index else 1)  # to know the size, the epoch is planned


class Learner:
    """A model with its optimizer, in the middle of its data."""

    def __init__(self, model: Model, objective: Objective, feed: ResumableBatches, settings: Settings):
        self.model, self.objective, self.feed, self.settings = model, objective, feed, settings
        self.device = next(model.parameters()).device
        if self.device.type == "cpu":
            load_kernels()  # which helpers have then
        self.optimizer = Optimizer(model, settings)
        self.gradients = Gradients(self.optimizer.parameters)
        self.ema = ExponentialMovingAverage(self.optimizer.parameters, settings.ema)
        for module in model.modules():
            if isinstance(module, Stack):
                module.gradient_checkpointing = settings.gradient_checkpointing
        self.casts = settings.precision == "bfloat16" and has_bfloat16(self.device)
        taps = [name for name, module in model.named_modules() if isinstance(module, Tap)]
        self._asks_more = any(name.rpartition(".")[2] == "loss" for name in taps)
        self._splits = self.device.type == "cpu" and getattr(objective, "splits", False) and not self._asks_more
        self._splits &= not any(isinstance(m, Norm) and [*m.buffers()] for m in model.modules())  # of a whole batch
        self._part = max(PART // model.width**2, FEWEST) if self._splits else 0
        self._workers: Workers | None = None
        self._size = sum(p.numel() for p in self.optimizer.parameters)
        self.place = Place.of(feed)
        self._ready: tuple[list[Batch], Place, int] | None = None
        self.step, self.tokens, self.lr, self.loss = 0, 0, 0.0, math.nan
        self.recent: deque[tuple[float, int]] = deque(maxlen=50)  # seconds and input tokens of steps

    def advance(self, rate: Callable[[], float]) -> bool:
        """One optimizer step, with the learning rate that `rate` gives once all else is known. False when the loss or
        the gradient was not finite, and no weight was changed."""
        begun = time.perf_counter()
        if not self.model.training:
            self.model.train()
        batches, self.place, inputs = self._ready or self._take()
        count = sum(batch.count for batch in batches)
        self.gradients.begin()
        sums = self._learn_all(batches, count)
        self.gradients.end()
        norm = self.optimizer.norm()
        self._ready = self._take()  # while the device is still at work
        *nll, length = torch.stack([*sums, norm.to(sums[0])]).tolist()  # the one wait for the device in a step
        if not math.isfinite(sum(nll)) or not math.isfinite(length):
            if isinstance(self.objective, StatefulObjective):
                self.objective.restore({})
            return False
        self.step, self.tokens, self.loss = self.step + 1, self.tokens + count, sum(nll) / count
        self.lr = rate()
        self.optimizer.step(self.lr, length)
        self.ema.follow(self.step)
        self.recent.append((time.perf_counter() - begun, inputs))
        return True

    def _take(self) -> tuple[list[Batch], Place, int]:
        """The batches of the next step, the place after them, and how many tokens they give to read."""
        batches = [next(self.feed) for _ in range(self.settings.gradient_accumulation)]
        inputs = sum(batch.input_tokens for batch in batches)  # before a device would have to be waited for
        return [batch.to(self.device) for batch in batches], Place.of(self.feed), inputs

    def _learn_all(self, batches: list[Batch], count: int) -> list[Tensor]:
        """Add the gradients of a step over `count` tokens. Sums of -log p."""
        cores = torch.get_num_threads() if self._splits and forks(self.device) else 1
        if cores < 2 or self._size * sum(batch.positions for batch in batches) < SPREAD:
            return self._learn_some([p for b in batches for p in (b.split(self._part) if self._splits else [b])], count)
        if self._workers is None or len(self._workers) != cores - 1:
            self._workers = Workers(self._learn_some, self.gradients, cores - 1)
        parts = [part for batch in batches for part in batch.split(self._part, cores)]
        torch.set_num_threads(1)
        try:
            self._workers.scatter([parts[i::cores] for i in range(1, cores)], count)
            sums = self._learn_some(parts[::cores], count)
            return sums + [sums[0].new_tensor(nll) for nll in self._workers.gather()]
        finally:
            torch.set_num_threads(cores)

    def _learn_some(self, batches: Sequence[Batch], count: int) -> list[Tensor]:
        return [self._learn(batch, count) for batch in batches]

    def _learn(self, batch: Batch, count: int) -> Tensor:
        """Add the gradient of one batch of a step over `count` tokens. The sum of -log p of its tokens."""
        asked = losses(self.model) if self._asks_more else nullcontext(lambda: 0.0)
        with asked as more, accumulate_into(self.gradients, 1 / count):  # until the end: layers may be computed again
            with self._precision():
                result = self.objective(self.model, batch)
                loss = result.loss / count + more() * (batch.count / count)
            loss.backward()
        return result.nll.detach()

    def _precision(self) -> AbstractContextManager:
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self.casts else nullcontext()

    @property
    def epoch(self) -> float:
        return self.place.epoch + self.place.taken / self.place.size

    @property
    def speed(self) -> float:
        """Return the tokens read per second, source and target, over the last steps."""
        seconds, tokens = (sum(column) for column in zip(*self.recent, strict=True)) if self.recent else (0.0, 0)
        return tokens / seconds if seconds else 0.0

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """The model as it is used: the average of its weights where there is one. Learning then goes on as if nothing
        had been."""
        chance = self.random()
        try:
            with self.ema.inside(), torch.no_grad():
                self.model.eval()
                yield
        finally:
            self.set_random(chance)

    def all_finite(self) -> bool:
        """All weights and running statistics are finite."""
        tensors = [t for t in (*self.model.parameters(), *self.model.buffers()) if t.is_floating_point()]
        return bool(torch.stack([t.isfinite().all() for t in tensors]).all())

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All but the model, as tensors and as numbers. Where there is an average of the weights, it is meant to be
        inside the model now."""
        tensors = {f"optimizer/{name}": t for name, t in self.optimizer.state().items()} | self.random()
        tensors |= {f"own/{i}": t for i, t in enumerate(self.ema.values)}
        if isinstance(self.objective, StatefulObjective):
            tensors |= {f"objective/{name}": t for name, t in self.objective.state().items()}
        numbers = {"optimizer": self.settings.optimizer, "step": self.step, "tokens": self.tokens}
        return tensors, numbers | {"epoch": self.place.epoch, "taken": self.place.taken}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """What `state` gave; the model is as it was then. The place in the data stays: see `seek`."""
        if numbers["optimizer"] != self.settings.optimizer:
            raise UserError(f"this run has '{numbers['optimizer']}' as optimizer, not '{self.settings.optimizer}'")
        self.optimizer.restore(_under("optimizer/", tensors))
        if isinstance(self.objective, StatefulObjective):
            self.objective.restore(_under("objective/", tensors))
        for i, value in enumerate(self.ema.values):
            value.copy_(tensors[f"own/{i}"])
        self.ema.swap()
        self.set_random(tensors)
        self.step, self.tokens = numbers["step"], numbers["tokens"]

    def seek(self, epoch: int, taken: int) -> None:
        """The data goes on from there."""
        self.feed = ResumableBatches(self.feed.batches, epoch, taken)
        self.place, self._ready = Place.of(self.feed), None

    def random(self) -> dict[str, Tensor]:
        """The state of the generators that dropout draws from."""
        states = {"random/cpu": torch.get_rng_state()}
        if self.device.type != "cpu":
            states["random/device"] = torch.get_device_module(self.device).get_rng_state()
        return states

    def set_random(self, states: dict[str, Tensor]) -> None:
        torch.set_rng_state(states["random/cpu"])
        if "random/device" in states and self.device.type != "cpu":
            torch.get_device_module(self.device).set_rng_state(states["random/device"])


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those whose names begin so, without it."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def has_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.amp.is_autocast_available(device.type)
