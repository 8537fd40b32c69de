"""Time and memory of one training step and of one decoding step, by part.

Every part of a model carries a label while it runs. An operation of the forward pass belongs to the innermost label
around it, and one of the backward pass to the label of its forward operation. Times are shares of a step without the
profiler.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from regard.core import Context, Embed, Head, Mixer, Model, Norm, Position, Tap, Towers, UserError, Wiring
from regard.core.mixer import state_bytes
from regard.parts.objectives.next_token import token_loss
from regard.runs.settings import Settings
from regard.schema import name_of
from regard.train.optimizer import Optimizer

from . import picture

TIMED_STEPS = 5  # without the profiler
PROFILED_STEPS = 3
LABEL_PREFIX = "regard: "
BACKWARD_EVENT = "autograd::engine::evaluate_function"
OTHER = "the rest"
MAX_BARS = 16  # parts in a picture


@dataclass
class Row:
    """One kind of part, summed over all layers."""

    part: str
    forward: float = 0.0  # seconds
    backward: float = 0.0
    kept: int = 0  # bytes saved for the backward pass; in decoding, bytes of the state


@dataclass
class Step:
    """A whole step, and its parts, the slowest first."""

    seconds: float
    tokens: int
    rows: list[Row]
    memory: dict[str, int] = field(default_factory=dict)  # bytes


def profile_training(model: Model | Towers, rows: int, length: int, settings: Settings | None = None) -> Step:
    """Profile a step on random input: forward, backward and the optimizer. The loss is the cross-entropy of random
    tokens for heads over a vocabulary, and the mean square of the output for others."""
    model.train()
    settings = settings or Settings()
    optimizer = Optimizer(model, settings)
    labels = PartLabels(model)
    batch = random_batch(model, rows, length)

    def step() -> None:
        optimizer.zero_grad()
        with labels.scope("loss"):
            loss = random_loss(model, batch)
        loss.backward()
        with labels.scope(f"optimizer {settings.optimizer}"):
            optimizer.step(settings.lr, float(optimizer.norm()))

    seconds = _median_seconds(step)
    found = _by_part(_profiled(labels, step))
    with labels.attached(), labels.saved_bytes() as kept:
        loss = random_loss(model, batch)
    for part, size in kept.items():
        found.setdefault(part, Row(part)).kept = size
    del loss
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    gradients = sum(p.numel() * p.element_size() for p in optimizer.parameters)
    states = sum(t.numel() * t.element_size() for t in optimizer.state().values())
    memory = {"weights": size, "gradients": gradients, "optimizer": states, "kept": sum(kept.values())}
    return Step(seconds, rows * length, _scaled(found, seconds), memory)


@torch.no_grad()
def profile_decoding(model: Model | Towers, rows: int, length: int) -> Step | None:
    """Profile a step of one token per row, after `length` others. Return None if the model does not step."""
    if isinstance(model, Towers) or model.head.pools or not (model.stack.streams and model.head.streams):
        return None
    model.eval()
    more = TIMED_STEPS + PROFILED_STEPS + 1
    if model.limit is not None and length + more > model.limit:
        length = model.limit - more
        if length < 1:
            raise UserError(f"a model of {model.limit} positions is too short to profile a decoding step")
    tokens, source = random_batch(model, rows, length + more)
    memory = {} if source is None else {"source": source[:, :length]}
    state = model.start(rows, length + more, **memory)
    _, state = model.step(tokens[:, :length], state)
    labels, at = PartLabels(model), length

    def step() -> None:
        nonlocal state, at
        _, state = model.step(tokens[:, at : at + 1], state)
        at += 1

    seconds = _median_seconds(step)
    found = _by_part(_profiled(labels, step))
    for layer, states in zip(model.stack._layers, state.layers, strict=True):
        for mixer, own in zip(layer.mixers, states, strict=True):
            if size := state_bytes(own):
                part = labels.names[mixer]
                found.setdefault(part, Row(part)).kept += size
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return Step(seconds, rows, _scaled(found, seconds), {"weights": size, "state": state_bytes(state.layers)})


class PartLabels:
    """The label of every part, and context managers that attach labels to what runs."""

    def __init__(self, model: nn.Module):
        self.names: dict[nn.Module, str] = {}
        for path, module in model.named_modules():
            if name := _label(path, module, self.names, model):
                self.names.setdefault(module, name)
        self.stack: list[str] = []

    @contextmanager
    def scope(self, part: str) -> Iterator[None]:
        self.stack.append(part)
        try:
            with record_function(LABEL_PREFIX + part):
                yield
        finally:
            self.stack.pop()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Within this context, every part carries its label while it runs."""
        stepping = [module for module in self.names if isinstance(module, Mixer)]
        try:
            for module, part in self.names.items():
                module.forward = self._wrap(part, module.forward)  # type: ignore[method-assign]
            for module in stepping:
                module.step = self._wrap(self.names[module], module.step)  # type: ignore[method-assign]
            yield
        finally:
            for module in self.names:
                vars(module).pop("forward", None)
            for module in stepping:
                vars(module).pop("step", None)

    def _wrap(self, part: str, run: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.scope(part):
                return run(*args, **kwargs)

        call.only_watches = True  # type: ignore[attr-defined]
        return call

    @contextmanager
    def saved_bytes(self) -> Iterator[Counter[str]]:
        """Count the bytes saved for the backward pass, by the part that first saves them, without the weights."""
        kept: Counter[str] = Counter()
        seen = {p.untyped_storage().data_ptr() for module in self.names for p in module.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                kept[self.stack[-1] if self.stack else "loss"] += storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield kept


def _label(path: str, module: nn.Module, known: dict[nn.Module, str], model: nn.Module) -> str | None:
    """Return side, slot and part: "decoder mixer attention". Submodules of a mixer add their own name."""
    parent, _, name = path.rpartition(".")
    around = model.get_submodule(parent) if parent else None
    side = "encoder" if path.startswith("encoder.") else "decoder"
    side = getattr(model, "kind", side) if getattr(model, "kind", "") in ("encoder", "decoder") else side
    if isinstance(module, Embed | Head):
        return f"{path.replace('.', ' ').replace('_', ' ')} {name_of(module)}"
    if isinstance(module, Wiring):
        return f"{side} wiring {name_of(module)}"
    if isinstance(module, Norm):
        return None if name_of(module) == "none" else f"{side} norm {name_of(module)}"
    if isinstance(module, Mixer | Position) and name_of(module) != "none":
        return f"{side} {name} {name_of(module)}"
    if isinstance(around, Mixer) and not isinstance(module, Tap) and not type(module).__module__.startswith("torch."):
        return f"{known[around]}: {name}" if around in known else None
    return None


def random_batch(model: Model | Towers, rows: int, length: int) -> tuple[Tensor, Tensor | None]:
    """Return random input for both sides, no longer than their maximum length."""
    device = next(model.parameters()).device
    if isinstance(model, Towers):
        image, text = (tower.embed.random_input(rows, length).to(device) for tower in model.towers.values())
        return image, text
    if model.limit is not None:
        length = min(length, model.limit)
    tokens = model.embed.random_input(rows, length).to(device)
    if model.source_embed is None:
        return tokens, None
    reach = length if model.source_limit is None else min(length, model.source_limit)
    return tokens, model.source_embed.random_input(rows, reach).to(device)


def random_loss(model: Model | Towers, batch: tuple[Tensor, Tensor | None]) -> Tensor:
    """Return a loss of a `random_batch`, as `profile_training` describes it."""
    tokens, source = batch
    if isinstance(model, Towers):
        return model(tokens, source).float().square().mean()
    memory = None if source is None else model.encode(source)
    context = Context.begin(*model.embed.extent(tokens), tokens.device, memory=memory)
    x = model.hidden(tokens, context)
    if model.head.pools or tokens.dim() > 2 or model.head.linear(x, context) is None:
        return model.head(x, context).float().square().mean()
    return token_loss(model, x, context, tokens.clamp(min=0), 0.0)[0] / tokens.numel()  # a canvas has blanks below 0


def _profiled(labels: PartLabels, step: Callable[[], None]) -> Any:
    """Return the events of torch's profiler over some steps, without its messages on the terminal."""
    terminal, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        with labels.attached(), profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(PROFILED_STEPS):
                step()
        return profiler.events()
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(nowhere)


def _median_seconds(step: Callable[[], None]) -> float:
    """Return the median seconds of a step, without the first one."""
    step()
    seconds = []
    for _ in range(TIMED_STEPS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def _by_part(events: Any) -> dict[str, Row]:
    """Return the microseconds of each part, summed over all profiled steps."""
    found: dict[str, Row] = {}
    part_of_sequence: dict[int, str] = {}  # by the sequence number of autograd
    by_event: dict[int, tuple[str, bool]] = {}  # part, and whether it is in the backward pass

    def part_of(event: Any) -> tuple[str, bool]:
        if event.id not in by_event:
            around = part_of(event.cpu_parent) if event.cpu_parent is not None else (OTHER, False)
            if event.name.startswith(LABEL_PREFIX):
                around = (event.name.removeprefix(LABEL_PREFIX), around[1])
            elif event.name.startswith(BACKWARD_EVENT):
                around = (part_of_sequence.get(event.sequence_nr, OTHER), True)
            by_event[event.id] = around
        return by_event[event.id]

    ordered = sorted(events, key=lambda event: event.time_range.start)
    for event in ordered:  # forward passes come before their backward passes
        part, back = part_of(event)
        if not back and event.sequence_nr >= 0:
            part_of_sequence[event.sequence_nr] = part
        row = found.setdefault(part, Row(part))
        if back:
            row.backward += event.self_cpu_time_total
        else:
            row.forward += event.self_cpu_time_total
    return found


def _scaled(found: dict[str, Row], seconds: float) -> list[Row]:
    """Return the rows, the slowest first, scaled to sum to the seconds of a step without the profiler."""
    rows = [row for row in found.values() if row.forward or row.backward or row.kept]
    total = sum(row.forward + row.backward for row in rows)
    for row in rows:
        row.forward, row.backward = (share / total * seconds for share in (row.forward, row.backward))
    return sorted(rows, key=lambda row: -(row.forward + row.backward))


def png(steps: Sequence[tuple[str, Step]], path: str | Path) -> Path:
    """Draw a profile as PNG: one panel per step with the forward and backward time of each part."""
    from matplotlib.figure import Figure

    path = picture.check_path(path)
    heights = [min(len(step.rows), MAX_BARS) + 2 for _, step in steps]
    chart = Figure(figsize=(9, 0.3 * sum(heights) + 0.6), layout="constrained")
    panels = chart.subplots(len(steps), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, step) in zip(panels, steps, strict=True):
        rows = step.rows[:MAX_BARS][::-1]
        names = [row.part for row in rows]
        forward = [1000 * row.forward for row in rows]
        axes.barh(names, forward, label="forward", color="#4878a8")
        if any(row.backward for row in rows):
            axes.barh(names, [1000 * row.backward for row in rows], left=forward, label="backward", color="#e0995e")
            axes.legend(loc="lower right")
        axes.set(title=f"{title}: {1000 * step.seconds:.1f} ms", xlabel="milliseconds")
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return picture.write(chart, path, 130)
