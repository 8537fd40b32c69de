"""Computes how much memory a model needs before it is built: a recipe that does not fit the machine is refused.

The model is built without weights and with one layer of each kind per stack; layers are then multiplied by the depth.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from regard.errors import UserError

if sys.platform != "win32":
    import resource

MAKERS = (torch.empty, torch.rand, torch.randn)
FILLERS = {getattr(torch.Tensor, name) for name in ("normal_", "uniform_", "zero_", "fill_", "copy_", "__setitem__")}
FILLERS |= {fill for name, fill in vars(nn.init).items() if name.endswith("_") and callable(fill)}
DRAWING_MAKERS = (torch.rand, torch.randn)
DRAWING_FILLERS = {torch.Tensor.normal_, torch.Tensor.uniform_} | {
    fill for name, fill in vars(nn.init).items() if name.endswith(("uniform_", "normal_")) and callable(fill)
}
SMALL = 1 << 30  # bytes, below which a model is not counted
COPIES = 16  # assumed square matrices of the largest size in a layer, for an upper bound
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container


class MetaWeights(TorchFunctionMode):
    """Inside, weights are created on the meta device and not initialized. Everything else runs as usual, since
    torch.device("meta") for everything takes seconds the first time."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = dict(kwargs or {})
        if func in FILLERS:
            target = args[0] if args else given["tensor"]
            return target if target.is_meta else func(*args, **given)
        if func in MAKERS and given.get("device") is None and given.get("generator") is None:
            given["device"] = "meta"
        return func(*args, **given)


class SkipInit(TorchFunctionMode):
    """Inside, weights are not initialized randomly, since they are about to be loaded: this is faster and leaves the
    host's random state alone."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = dict(kwargs or {})
        if given.get("generator") is None and func in (*DRAWING_FILLERS, *DRAWING_MAKERS):
            given.pop("generator", None)
            if func in DRAWING_FILLERS:
                return args[0] if args else given["tensor"]
            return torch.zeros(*args, **given)
        return func(*args, **given)


def machine_memory() -> int:
    """Return the bytes that this process may use: the machine's memory, or the limit of a container or the process."""
    if sys.platform == "win32":
        return sys.maxsize  # unknown there
    known = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in LIMITS:
        try:
            known.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # there is none, or it says "max"
            continue
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return min([*known, *([] if limit == resource.RLIM_INFINITY else [limit])])


def format_bytes(count: int) -> str:
    """1,234 -> '1.2 kB'."""
    size, units = float(count), ["bytes", "kB", "MB", "GB", "TB", "PB", "EB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:,.0f} {units[0]}" if units[0] == "bytes" else f"{size:,.1f} {units[0]}"


def check_fits_memory(what: str, size: int) -> None:
    """Refuse a size that exceeds the memory of this machine, except on the meta device."""
    if torch.empty(0).is_meta:
        return
    there = machine_memory()
    if size > there:
        raise UserError(f"{what} takes {format_bytes(size)} of memory, and this machine has {format_bytes(there)}")


def model_bytes(recipe: dict[str, Any], assemble: Callable[[dict[str, Any]], nn.Module]) -> int:
    """Return the bytes of the weights of a recipe's model, without allocating them; 0 for one that is surely small or
    cannot be built. assemble: builds the model of a recipe."""
    if _at_most(recipe) < SMALL or torch.empty(0).is_meta:
        return 0
    short = copy.deepcopy(recipe)
    found = list(stacks(short["model"]))
    for stack, kinds, depth in found:
        stack["depth"] = min(kinds, depth)
    try:
        once = _counted(short, assemble)
        total = once
        for stack, kinds, depth in found:
            if depth > kinds:
                stack["depth"] = 2 * kinds
                total += (_counted(short, assemble) - once) * (depth - kinds) // kinds
                stack["depth"] = kinds
        return total
    except UserError:  # whatever is wrong is told about the recipe as it is written
        return 0


def _counted(recipe: dict[str, Any], assemble: Callable[[dict[str, Any]], nn.Module]) -> int:
    with MetaWeights():
        model = assemble(recipe)
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


def stacks(table: dict[str, Any], outer: int = 1) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield the tables of stacks, each with its number of layer kinds and its depth."""
    depth = table.get("depth", outer)
    for side in ("encoder", "decoder", "image", "text"):
        if isinstance(table.get(side), dict):
            yield from stacks(table[side], depth)
    layers = table.get("layer")
    if isinstance(layers, dict | list) and layers and isinstance(depth, int):
        yield table, len(layers) if isinstance(layers, list) else 1, depth


def _at_most(recipe: dict[str, Any]) -> int:
    """Return a rough upper bound of the bytes: COPIES square matrices of the largest size for every layer."""
    largest = max(_numbers([recipe["model"], recipe.get("vocab", 1)]), default=1)
    depth = sum(depth for _, _, depth in stacks(recipe["model"]))
    return largest**2 * 4 * COPIES * max(depth, 1)


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        yield abs(value)
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _numbers(one)
