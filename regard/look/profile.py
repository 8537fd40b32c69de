"""Where the time and the memory of one training step and of one decoding step go, by part.

Every part of a model carries a label while it runs. An operation of the forward pass belongs to the innermost label
around it, one of the backward pass to the label of the operation that it is the derivative of. Times are shares of what
the whole step takes without being watched.
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
from regard.parts.objectives.next_token import of_tokens
from regard.runs.settings import Settings
from regard.schema import name_of
from regard.train.optimizer import Optimizer

from . import picture

ROUNDS = 5  # steps that are timed, and not watched
WATCHED = 3  # steps that are watched
MARK = "regard: "
DERIVATIVE = "autograd::engine::evaluate_function"
REST = "the rest"
SHOWN = 16  # parts in a picture


@dataclass
class Row:
    """One kind of part, all layers together."""

    part: str
    forward: float = 0.0  # seconds
    backward: float = 0.0
    kept: int = 0  # bytes that wait for the backward pass; of decoding: of the state


@dataclass
class Step:
    """A step as a whole, and by part, the slowest first."""

    seconds: float
    tokens: int
    rows: list[Row]
    memory: dict[str, int] = field(default_factory=dict)  # bytes


def training(model: Model | Towers, rows: int, length: int, settings: Settings | None = None) -> Step:
    """A step on random input: forward, backward and the optimizer. Heads over a vocabulary are asked for random tokens;
    of others, all that they say is squared."""
    model.train()
    settings = settings or Settings()
    optimizer = Optimizer(model, settings)
    labels = Labels(model)
    batch = _draw(model, rows, length)

    def step() -> None:
        optimizer.zero_grad()
        with labels.named("loss"):
            loss = _loss(model, batch)
        loss.backward()
        with labels.named(f"optimizer {settings.optimizer}"):
            optimizer.step(settings.lr, float(optimizer.norm()))

    taken = _times(step)
    found = _by_part(_watched(labels, step))
    with labels.on(), labels.keeping() as kept:
        loss = _loss(model, batch)
    for part, size in kept.items():
        found.setdefault(part, Row(part)).kept = size
    del loss
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    learning = sum(p.numel() * p.element_size() for p in optimizer.parameters)
    states = sum(t.numel() * t.element_size() for t in optimizer.state().values())
    memory = {"weights": size, "gradients": learning, "optimizer": states, "kept": sum(kept.values())}
    return Step(taken, rows * length, _scaled(found, taken), memory)


@torch.no_grad()
def decoding(model: Model | Towers, rows: int, length: int) -> Step | None:
    """A step of one token in each row, after `length` others. None where a model does not step."""
    if isinstance(model, Towers) or model.head.pools or not (model.stack.streams and model.head.streams):
        return None
    model.eval()
    more = ROUNDS + WATCHED + 1
    if model.limit is not None and length + more > model.limit:
        length = model.limit - more
        if length < 1:
            raise UserError(f"a model of {model.limit} positions has no room for a step to be measured")
    tokens, source = _draw(model, rows, length + more)
    known = {} if source is None else {"source": source[:, :length]}
    state = model.start(rows, length + more, **known)
    _, state = model.step(tokens[:, :length], state)
    labels, at = Labels(model), length

    def step() -> None:
        nonlocal state, at
        _, state = model.step(tokens[:, at : at + 1], state)
        at += 1

    taken = _times(step)
    found = _by_part(_watched(labels, step))
    for layer, states in zip(model.stack._layers, state.layers, strict=True):
        for mixer, own in zip(layer.mixers, states, strict=True):
            if size := state_bytes(own):
                part = labels.of[mixer]
                found.setdefault(part, Row(part)).kept += size
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return Step(taken, rows, _scaled(found, taken), {"weights": size, "state": state_bytes(state.layers)})


class Labels:
    """What every part is called, and a way to see who is at work."""

    def __init__(self, model: nn.Module):
        self.of: dict[nn.Module, str] = {}
        for path, module in model.named_modules():
            if name := _label(path, module, self.of, model):
                self.of.setdefault(module, name)
        self.stack: list[str] = []

    @contextmanager
    def named(self, part: str) -> Iterator[None]:
        self.stack.append(part)
        try:
            with record_function(MARK + part):
                yield
        finally:
            self.stack.pop()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, every part carries its label while it runs."""
        stepping = [module for module in self.of if isinstance(module, Mixer)]
        try:
            for module, part in self.of.items():
                module.forward = self._under(part, module.forward)  # type: ignore[method-assign]
            for module in stepping:
                module.step = self._under(self.of[module], module.step)  # type: ignore[method-assign]
            yield
        finally:
            for module in self.of:
                vars(module).pop("forward", None)
            for module in stepping:
                vars(module).pop("step", None)

    def _under(self, part: str, run: Callable) -> Callable:
        def call(*given: Any, **named: Any) -> Any:
            with self.named(part):
                return run(*given, **named)

        call.only_watches = True  # type: ignore[attr-defined]
        return call

    @contextmanager
    def keeping(self) -> Iterator[Counter[str]]:
        """Bytes that wait for the backward pass, each counted for the part that first wants it. Not the weights."""
        kept: Counter[str] = Counter()
        seen = {p.untyped_storage().data_ptr() for module in self.of for p in module.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                kept[self.stack[-1] if self.stack else "loss"] += storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield kept


def _label(path: str, module: nn.Module, known: dict[nn.Module, str], model: nn.Module) -> str | None:
    """Side, place and part: "decoder mixer attention". What a mixer is made of has its own name behind that."""
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


def _draw(model: Model | Towers, rows: int, length: int) -> tuple[Tensor, Tensor | None]:
    """Random input for both sides, as long as their positions allow."""
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


def _loss(model: Model | Towers, batch: tuple[Tensor, Tensor | None]) -> Tensor:
    tokens, source = batch
    if isinstance(model, Towers):
        return model(tokens, source).float().square().mean()
    memory = None if source is None else model.encode(source)
    context = Context.begin(*model.embed.extent(tokens), tokens.device, memory=memory)
    x = model.hidden(tokens, context)
    if model.head.pools or tokens.dim() > 2 or model.head.linear(x, context) is None:
        return model.head(x, context).float().square().mean()
    return of_tokens(model, x, context, tokens, 0.0)[0] / tokens.numel()


def _watched(labels: Labels, step: Callable[[], None]) -> Any:
    """What torch's profiler saw in some steps. What it says about itself on the terminal is not shown."""
    terminal, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        with labels.on(), profile(activities=[ProfilerActivity.CPU]) as seen:
            for _ in range(WATCHED):
                step()
        return seen.events()
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
        os.close(nowhere)


def _times(step: Callable[[], None]) -> float:
    """Seconds of one step, the first one left out."""
    step()
    taken = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        step()
        taken.append(time.perf_counter() - begun)
    return median(taken)


def _by_part(events: Any) -> dict[str, Row]:
    """From what the profiler saw: microseconds of each part, of all steps together."""
    found: dict[str, Row] = {}
    of_number: dict[int, str] = {}  # the part of each operation that has a derivative
    told: dict[int, tuple[str, bool]] = {}  # part, and whether it is of the backward pass

    def part_of(event: Any) -> tuple[str, bool]:
        if event.id not in told:
            around = part_of(event.cpu_parent) if event.cpu_parent is not None else (REST, False)
            if event.name.startswith(MARK):
                around = (event.name.removeprefix(MARK), around[1])
            elif event.name.startswith(DERIVATIVE):
                around = (of_number.get(event.sequence_nr, REST), True)
            told[event.id] = around
        return told[event.id]

    ordered = sorted(events, key=lambda event: event.time_range.start)
    for event in ordered:  # forward passes come before their backward passes
        part, back = part_of(event)
        if not back and event.sequence_nr >= 0:
            of_number[event.sequence_nr] = part
        row = found.setdefault(part, Row(part))
        if back:
            row.backward += event.self_cpu_time_total
        else:
            row.forward += event.self_cpu_time_total
    return found


def _scaled(found: dict[str, Row], taken: float) -> list[Row]:
    """The slowest first, all together as long as a step that was not watched."""
    rows = [row for row in found.values() if row.forward or row.backward or row.kept]
    whole = sum(row.forward + row.backward for row in rows)
    for row in rows:
        row.forward, row.backward = (share / whole * taken for share in (row.forward, row.backward))
    return sorted(rows, key=lambda row: -(row.forward + row.backward))


def png(steps: Sequence[tuple[str, Step]], path: str | Path) -> Path:
    """Draw a profile: one panel for each step, under its title, of who takes how long, forward and backward."""
    from matplotlib.figure import Figure

    path = picture.place(path)
    heights = [min(len(step.rows), SHOWN) + 2 for _, step in steps]
    drawn = Figure(figsize=(9, 0.3 * sum(heights) + 0.6), layout="constrained")
    panels = drawn.subplots(len(steps), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, step) in zip(panels, steps, strict=True):
        rows = step.rows[:SHOWN][::-1]
        names = [row.part for row in rows]
        ahead = [1000 * row.forward for row in rows]
        axes.barh(names, ahead, label="forward", color="#4878a8")
        if any(row.backward for row in rows):
            axes.barh(names, [1000 * row.backward for row in rows], left=ahead, label="backward", color="#e0995e")
            axes.legend(loc="lower right")
        axes.set(title=f"{title}: {1000 * step.seconds:.1f} ms", xlabel="milliseconds")
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return picture.write(drawn, path, 130)
