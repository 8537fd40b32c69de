"""Examine this machine, and trace the ops of a model: what regard can use, what would make it faster, and what runs
each op.

Ops are observed, not predicted: a training step and some decoding steps run on random input, while ops/dispatch.py
records its decisions.
"""

from __future__ import annotations

import os
import platform
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard import __version__
from regard.core import Model, Stack, Towers
from regard.decode import DecodeConfig, Request, search
from regard.decode.canvas import Marks, write
from regard.look.profile import random_batch, random_loss
from regard.machine import cpu_lines
from regard.memory import machine_memory
from regard.native.build import find_compiler, load_kernels, why_unavailable
from regard.ops.accumulate import accumulate_into
from regard.ops.dispatch import Decision, note, recording
from regard.runs.settings import Settings
from regard.train.learner import has_bfloat16

INSTRUCTIONS = ("avx", "avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "neon", "asimd", "sve")

NEW_TOKENS = 4  # decoded per row
COMPOSITE = ("fused step", "fused attention", "projected attention")  # ops that replace several others


def examine() -> dict[str, Any]:
    """Return facts by section, and under "advice" sentences on what would help."""
    kernels = load_kernels()
    machine = {
        "cpu": cpu_lines("model name")[:1] or [platform.processor() or platform.machine()],
        "cores": _cores(),
        "instruction sets": _instruction_sets(),
        "memory": machine_memory(),
        "accelerators": _accelerators(),
    }
    software = {
        "regard": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch threads": torch.get_num_threads(),
    }
    own = {
        "compiled": kernels is not None,
        "why not": why_unavailable(),
        "compiler": find_compiler() or "none",
        "matrix products": "regard's where they are narrow" if kernels and kernels.multiplies else "torch's",
    }
    return {
        "machine": machine | {"cpu": machine["cpu"][0]},
        "software": software,
        "kernels": own,
        "advice": _advice(machine, own),
    }


def _advice(machine: dict[str, Any], kernels: dict[str, Any]) -> list[str]:
    said = []
    if not kernels["compiled"]:
        said.append(f"Decoding and training on this CPU are slower than they could be: {kernels['why not']}.")
    threads, busy = torch.get_num_threads(), _load()
    if busy >= machine["cores"] / 2 and threads > 1:
        said.append(
            f"Other programs keep about {busy:.1f} of {machine['cores']} cores busy, and threads wait for each other: "
            f"--threads {max(machine['cores'] - round(busy), 1)} is faster until they end."
        )
    elif threads < machine["cores"]:
        said.append(f"torch uses {threads} of {machine['cores']} cores: say --threads {machine['cores']}.")
    if machine["accelerators"]:
        said.append(f"Say --device {machine['accelerators'][0]} to train and decode there.")
    return said


def _load() -> float:
    """Return how many cores were busy in the last minute, this process not counted."""
    return max(os.getloadavg()[0] - 1, 0.0) if hasattr(os, "getloadavg") else 0.0


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _instruction_sets() -> list[str]:
    known = {word for entry in ("flags", "Features") for line in cpu_lines(entry) for word in line.split()}
    return [name for name in INSTRUCTIONS if name in known]


def _accelerators() -> list[str]:
    found = ["cuda"] if torch.cuda.is_available() else []
    return [*found, "mps"] if torch.backends.mps.is_available() else found


def trace_ops(model: Model | Towers, rows: int = 16, length: int = 64) -> dict[str, list[dict[str, Any]] | None]:
    """Return, for training and for decoding, what runs each op of a model, why, and how often it was called; None for
    decoding if the model does not step. The recipe's precision, gradient checkpointing and beam are used."""
    was_training, grads = model.training, [p.grad for p in model.parameters()]
    try:
        return {"training": _trace_training(model, rows, length), "decoding": _trace_decoding(model, rows, length)}
    finally:
        model.train(was_training)
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad


def _trace_training(model: Model | Towers, rows: int, length: int) -> list[dict[str, Any]]:
    settings = Settings.read(getattr(model, "recipe", {}).get("train", {}))
    model.train()
    device = next(model.parameters()).device
    batch = random_batch(model, rows, length)
    uses_bfloat16 = settings.precision == "bfloat16" and has_bfloat16(device)
    precision = torch.autocast(device.type, dtype=torch.bfloat16) if uses_bfloat16 else nullcontext()
    accumulating = accumulate_into(_TemporaryBuffers(), 1 / batch[0].numel())
    with _checkpointing(model, settings.gradient_checkpointing), _record_ops() as seen, accumulating:
        with precision:
            loss = random_loss(model, batch)
        loss.backward()
    return _as_rows(seen)


class _TemporaryBuffers:
    """Gradient buffers as in training, thrown away after use."""

    def buffer_for(self, weight: Tensor) -> Tensor:
        return torch.zeros_like(weight)


@torch.no_grad()
def _trace_decoding(model: Model | Towers, rows: int, length: int) -> list[dict[str, Any]] | None:
    model.eval()
    if isinstance(model, Model) and model.length is not None:
        with _record_ops() as seen:
            config = DecodeConfig.read(getattr(model, "recipe", {}).get("decode", {}))
            write(model, model.encode(*random_batch(model, rows, length)[1:]), Marks(0, 1, 2), config)
        return _as_rows(seen)
    if isinstance(model, Towers) or model.head.pools or not (model.stack.streams and model.head.streams):
        return None
    config = replace(DecodeConfig.read(getattr(model, "recipe", {}).get("decode", {})), speculate=0, shortlist=False)
    if model.limit is not None:
        length = max(min(length, model.limit - NEW_TOKENS), 1)
    tokens, source = random_batch(model, rows, length)
    max_new_tokens = torch.full((rows,), min(NEW_TOKENS, model.limit or NEW_TOKENS), device=tokens.device)
    with _record_ops() as seen:
        memory = None if source is None else model.encode(source)
        prefix = tokens if memory is None else tokens[:, :1]
        search(model, Request(prefix, -1, max_new_tokens, None, memory), config)  # no token ends it
    return _as_rows(seen)


@contextmanager
def _checkpointing(model: Model | Towers, on: bool) -> Iterator[None]:
    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    before = [stack.gradient_checkpointing for stack in stacks]
    try:
        for stack in stacks:
            stack.gradient_checkpointing = on
        yield
    finally:
        for stack, was_on in zip(stacks, before, strict=True):
            stack.gradient_checkpointing = was_on


@contextmanager
def _record_ops() -> Iterator[Counter[Decision]]:
    with recording() as seen, _NoteTorchLinears():
        yield seen


class _NoteTorchLinears(TorchFunctionMode):
    """Notes the linear layers that dispatch does not decide: those that a part calls itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and not sys._getframe(1).f_globals["__name__"].startswith("regard.ops."):
            note("linear", "the part calls torch.nn.Linear itself")
        return func(*args, **(kwargs or {}))


def _as_rows(seen: Counter[Decision]) -> list[dict[str, Any]]:
    """Return the decisions as rows: composite ops first, then the others in the order of their first call."""
    order = list(dict.fromkeys([*COMPOSITE, *(decision.op for decision in seen)]))
    found = sorted(seen.items(), key=lambda item: order.index(item[0].op))
    return [decision._asdict() | {"calls": calls} for decision, calls in found]
