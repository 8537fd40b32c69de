"""Buckets, biases and waves of Hugging Face's T5, BLOOM, MPT, Marian, Whisper and Llama, and torchscale's xPos."""

import re

import torch
from torch import Tensor

from regard.core import Context, watch
from regard.parts.mixers.attention import Attention
from regard.parts.positions.alibi import Alibi
from regard.parts.positions.rotary import Rotary
from regard.parts.positions.sinusoidal import Sinusoidal
from regard.parts.positions.t5 import T5
from regard.parts.positions.xpos import Xpos
from regard.verify.golden import Golden
from regard.verify.laws import Finding


def buckets(golden: Golden) -> dict[str, Tensor]:
    """in.rel is key minus query."""
    c = golden.config
    made = {}
    for name, bidirectional in (("bidirectional", True), ("unidirectional", False)):
        position = T5(16, 1, c["t5_num_buckets"], c["t5_max_distance"], bidirectional)
        made[f"t5_bucket_{name}"] = position.bucket(golden.input("rel"))
    return made


def biases(golden: Golden) -> dict[str, Tensor]:
    """Of the last query, for every number of heads that the file knows. BLOOM adds slope * key instead of
    -slope * distance, which is the same to the softmax: a constant per query more."""
    made = {}
    for name in [n.removeprefix("out.") for n in golden.tensors]:
        found = re.fullmatch(r"alibi_(bloom|mpt)_bias_H(\d+)", name)
        if not found:
            continue
        keys = golden.output(name).shape[-1]
        at = torch.arange(keys)
        bias = Alibi(int(found[2])).bias(at[None, None, -1:, None], at[None, None, None], torch.zeros(1))[0]
        made[name] = bias - bias[..., :1] if found[1] == "bloom" else bias
    return made


def positions(golden: Golden) -> list[Finding]:
    c = golden.config
    at = torch.arange(c["length"])
    made = buckets(golden) | biases(golden)
    made["sinusoid_marian"] = Sinusoidal(c["sinusoid_dim"], layout="halves").table(at)
    made["sinusoid_whisper"] = Sinusoidal(c["sinusoid_dim"], layout="halves", spread="ends").table(at)
    waves = Rotary(c["rope_head_dim"], base=c.get("rope_theta", 10000.0)).cos_sin(at)
    for name, wave in zip(("cos", "sin"), waves, strict=True):
        made[f"rope_llama_{name}"] = torch.cat((wave, wave), -1)  # one for each channel of a pair
    left = {n.removeprefix("out.") for n in golden.tensors if n.startswith("out.")} - set(made)
    assert not left, f"not compared: {sorted(left)}"
    return golden.compare(made)


def xpos(golden: Golden) -> list[Finding]:
    """torchscale centres the factors at half of the sequence at hand, rounded up. Only the product of a query's and a
    key's factor matters, and any fixed centre gives the same, so weights and output are compared with another one; to
    meet xpos_q and xpos_k themselves, ours is put where theirs falls."""
    c = golden.config
    heads, x, y = c["decoder_attention_heads"], golden.input("x"), golden.input("y")
    attention = Attention(
        c["decoder_embed_dim"], heads, position={"part": "xpos", "scale_base": c["xpos_scale_base"], "centre": 3}
    )
    names = {
        f"{ours}.{kind}": f"{theirs}.{kind}"
        for ours, theirs in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("out", "out_proj"))
        for kind in ("weight", "bias")
    }
    golden.load(attention, names)
    with watch(attention, "attend.weights") as seen:
        out = attention(x, Context.begin(*x.shape[:2]))
    made = {"out": out, "weights": seen["attend.weights"][0].flatten(0, 1)}
    length, dim = y.shape[1:]
    same = Xpos(dim, scale_base=c["xpos_scale_base"], centre=(length + 1) // 2)
    at = torch.arange(length)[None]
    made["xpos_q"], made["xpos_k"] = (f(y[:, None], at)[:, 0] for f in (same.query, same.key))
    return golden.compare(made)


CASES = {"positions": positions, "xpos": xpos}
