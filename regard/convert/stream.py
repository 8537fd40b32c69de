"""Write a safetensors file one tensor at a time, so that the model may be larger than memory; the safetensors library
takes all tensors at once. https://github.com/huggingface/safetensors describes the format."""

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

from .folder import INDEX_FILE, TYPES, WEIGHTS_FILE, TensorInfo

NAMES = {dtype: name for name, dtype in TYPES.items()}


def write(
    path: Path, tensors: Mapping[str, TensorInfo], take: Callable[[str], Tensor], tick: Callable[[int], None]
) -> None:
    """Write a safetensors file.

    tensors: shape and type of each tensor.
    take:    returns a tensor by name, when it is written.
    tick:    called with the bytes of each tensor.
    """
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
    tensors: Mapping[str, TensorInfo],
    take: Callable[[str], Tensor],
    max_bytes: int,
    tick: Callable[[int], None],
) -> None:
    """Write one file, or several of at most so many bytes with an index."""
    shards: list[list[str]] = [[]]
    free = max_bytes
    for name, info in tensors.items():
        if shards[-1] and size_of(info) > free:
            shards.append([])
            free = max_bytes
        shards[-1].append(name)
        free -= size_of(info)
    if len(shards) == 1:
        return write(folder / WEIGHTS_FILE, tensors, take, tick)
    places = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write(folder / file, {name: tensors[name] for name in names}, take, tick)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(map(size_of, tensors.values()))}, "weight_map": places}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")


def size_of(info: TensorInfo) -> int:
    return math.prod(info.shape) * info.dtype.itemsize
