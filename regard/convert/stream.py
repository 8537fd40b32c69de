"""A safetensors file written one tensor after the other, so that a model larger than memory goes through: the library
itself wants all of them at once. https://github.com/huggingface/safetensors describes the format."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from regard.core import UserError
from regard.errors import in_one_line, short

from .folder import INDEX, TYPES, WHOLE, Known

NAMES = {dtype: name for name, dtype in TYPES.items()}


def write(path: Path, tensors: Mapping[str, Known], take: Callable[[str], Tensor], tick: Callable[[int], None]) -> None:
    """tensors: what will be there; take: gives each when its turn has come; tick: called with the bytes of each."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # as the library aligns them
    for name in order:
        size = size_of(tensors[name])
        header[name] = {"dtype": NAMES[tensors[name].dtype], "shape": list(tensors[name].shape)}  # type: ignore[dict-item]
        header[name]["data_offsets"] = [at, at + size]  # type: ignore[assignment]
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                tensor = take(name).contiguous()
                assert (tuple(tensor.shape), tensor.dtype) == tensors[name], name
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
                tick(size_of(tensors[name]))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise UserError(f"{short(path)} cannot be written: {in_one_line(error)}") from None
    finally:
        part.unlink(missing_ok=True)


def write_shards(
    folder: Path,
    tensors: Mapping[str, Known],
    take: Callable[[str], Tensor],
    most: int,
    tick: Callable[[int], None],
) -> None:
    """One file, or several of at most so many bytes and the index that says what is where."""
    shards: list[list[str]] = [[]]
    room = most
    for name, known in tensors.items():
        if shards[-1] and size_of(known) > room:
            shards.append([])
            room = most
        shards[-1].append(name)
        room -= size_of(known)
    if len(shards) == 1:
        return write(folder / WHOLE, tensors, take, tick)
    places = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write(folder / file, {name: tensors[name] for name in names}, take, tick)
        places |= dict.fromkeys(names, file)
    told = {"metadata": {"total_size": sum(map(size_of, tensors.values()))}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(told, indent=2), encoding="utf-8")


def size_of(known: Known) -> int:
    return math.prod(known.shape) * known.dtype.itemsize
