"""Examine this machine: what regard can use, and what would make it faster."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from regard import __version__
from regard.machine import cpu_lines
from regard.memory import machine_memory
from regard.native.build import find_compiler, load_kernels, why_unavailable

INSTRUCTIONS = ("avx", "avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "neon", "asimd", "sve")


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
    threads = torch.get_num_threads()
    if threads < machine["cores"]:
        said.append(f"torch uses {threads} of {machine['cores']} cores: say --threads {machine['cores']}.")
    if machine["accelerators"]:
        said.append(f"Say --device {machine['accelerators'][0]} to train and decode there.")
    return said


def _cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _instruction_sets() -> list[str]:
    known = {word for entry in ("flags", "Features") for line in cpu_lines(entry) for word in line.split()}
    return [name for name in INSTRUCTIONS if name in known]


def _accelerators() -> list[str]:
    found = ["cuda"] if torch.cuda.is_available() else []
    return [*found, "mps"] if torch.backends.mps.is_available() else found
