"""A model larger than what may be held in memory goes through, tensor by tensor."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from regard.convert import convert
from regard.convert.folder import TensorInfo
from regard.convert.stream import size_of, write

CONFIG = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 2000, "n_positions": 64, "n_embd": 640,
    "n_layer": 16, "n_head": 10,
}  # fmt: skip


def held() -> int:
    """Bytes of memory that are really this process's own, files that are mapped not among them."""
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def shapes() -> dict[str, TensorInfo]:
    found = {"transformer.wte.weight": (2000, 640), "transformer.wpe.weight": (64, 640)}
    found |= {f"transformer.ln_f.{kind}": (640,) for kind in ("weight", "bias")}
    for i in range(16):
        maps = {
            "attn.c_attn": (640, 1920),
            "attn.c_proj": (640, 640),
            "mlp.c_fc": (640, 2560),
            "mlp.c_proj": (2560, 640),
        }
        for name, shape in maps.items():
            found[f"transformer.h.{i}.{name}.weight"] = shape
            found[f"transformer.h.{i}.{name}.bias"] = shape[1:]
        found |= {
            f"transformer.h.{i}.{norm}.{kind}": (640,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")
        }
    return {name: TensorInfo(shape, torch.float32) for name, shape in found.items()}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells how much memory is a process's own")
def test_memory_does_not_grow_with_the_model(tmp_path):
    theirs = tmp_path / "theirs"
    tensors = shapes()
    whole = sum(map(size_of, tensors.values()))
    assert whole > 300e6
    write(theirs / "model.safetensors", tensors, lambda name: torch.rand(tensors[name].shape), lambda size: None)
    (theirs / "config.json").write_text(json.dumps(CONFIG))
    most: list[int] = []

    def watch(done: int, of: int) -> None:
        most.append(held())

    convert(theirs, tmp_path / "run", tick=watch)
    convert(tmp_path / "run", tmp_path / "back", tick=watch)
    assert len(most) >= 2 * len(tensors)
    assert max(most) - most[0] < whole / 5  # the first is after all that is loaded to do it
    assert (theirs / "model.safetensors").read_bytes() == (tmp_path / "back" / "model.safetensors").read_bytes()
