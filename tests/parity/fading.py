"""Memories that fade: fast-transformers' linear attention, torchscale's RetNet, flash-linear-attention's recurrences.

What the latter computes is our kernel; where it scales queries by the root of their channels, so do we here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard.core import Context, Model, Stack, build, watch
from regard.ops.delta import delta
from regard.ops.fading import Summary, gated_linear_attention
from regard.parts.mixers.linear import Linear
from regard.parts.mixers.retention import Retention
from regard.verify.golden import Golden, in_steps
from regard.verify.laws import Finding


def cuts(time: int) -> list[slice]:
    """The positions 0 ... time in pieces of random sizes."""
    pieces, begin = [], 0
    while begin < time:
        end = min(begin + int(torch.randint(1, 6, ())), time)
        pieces.append(slice(begin, end))
        begin = end
    return pieces


def prefix(lengths: Tensor, time: int) -> Tensor:
    return torch.arange(time) < lengths[:, None]


def linear_attention(golden: Golden) -> list[Finding]:
    """Theirs is (batch, time, heads, channels), without the projections."""
    c = golden.config
    mixer = Linear(c["H"] * c["M"], c["H"], c["E"], c["M"], causal=c["causal"], eps=c["eps"])
    q, k, v = (golden.input(name).transpose(1, 2) for name in "qkv")
    valid = prefix(golden.input("key_lengths"), k.shape[2])
    if not c["causal"]:
        return golden.compare({"out": mixer.attend_all(q, k, v, valid).transpose(1, 2)})
    y, _ = mixer.attend_past(q, k, v, None, valid)
    findings = golden.compare({"out": y.transpose(1, 2)})
    state, steps = Summary(torch.zeros(*k.shape[:2], c["E"], c["M"] + 1)), []
    with torch.no_grad():
        for here in cuts(k.shape[2]):
            y, state = mixer.attend_past(*(t[:, :, here] for t in (q, k, v)), state, valid[:, here])
            steps.append(y)
    ours = {"final_S": state.matrix[..., :-1], "final_Z": state.matrix[..., -1]}
    findings += golden.compare({"out": torch.cat(steps, 2).transpose(1, 2)}, gradients=False)
    return findings + [extra(golden, name, value) for name, value in ours.items() if f"extra.{name}" in golden]


def extra(golden: Golden, name: str, ours: Tensor, limit: float = 1e-5) -> Finding:
    want = golden.extra(name)
    worst = float((ours.detach() - want).abs().max())
    return Finding(f"{golden.system}-{golden.variant} {name}", worst, limit * max(1.0, float(want.abs().max())))


def linear_transformer(golden: Golden) -> list[Finding]:
    c, heads = golden.config, golden.config["n_heads"]
    x = golden.input("x")
    mixer = {"part": "linear", "dim": c["query_dimensions"], "value_dim": c["value_dimensions"]}
    feedforward = {"part": "mlp", "hidden": c["feed_forward_dimensions"], "activation": c.get("activation", "relu")}
    layer = {"mixer": mixer, "feedforward": feedforward, "wiring": "post"}
    stack = Stack(x.shape[-1], c["n_layers"], layer, heads, norm="layer")
    names = pair("norm.inner", "norm")
    for i in range(c["n_layers"]):
        ours, theirs = f"layers.{i}", f"layers.{i}"
        for own, original in (("q", "query"), ("k", "key"), ("v", "value"), ("out", "out")):
            names |= pair(f"{ours}.branches.mixer.{own}", f"{theirs}.attention.{original}_projection")
        for own, original in (("into", "linear1"), ("out", "linear2")):
            names |= pair(f"{ours}.branches.feedforward.{own}", f"{theirs}.{original}")
        for index in (0, 1):
            names |= pair(f"{ours}.wiring.norms.{index}.inner", f"{theirs}.norm{index + 1}")
    golden.load(stack, names)
    findings = golden.compare({"out": stack(x, Context.begin(*x.shape[:2]))})
    return findings + golden.compare({"out": in_steps(stack, x)}, gradients=False)


def retnet(golden: Golden) -> list[Finding]:
    """Its angles are 10000^(-i / (pairs - 1)), and the paper's 10000^(-i / pairs): the same with another base."""
    c, heads, width = golden.config, golden.config["decoder_retention_heads"], golden.config["decoder_embed_dim"]
    dim = width // heads
    rotary = {"part": "rotary", "layout": "interleaved", "base": 10000 ** (dim / max(dim - 2, 1))}
    norm = {"part": "rms", "eps": c["layernorm_eps"]}
    before = c["decoder_normalize_before"]
    layer = {
        "mixer": {
            "part": "retention",
            "value_dim": c["decoder_value_embed_dim"] // heads,
            "position": rotary,
            "head_norm": {**norm, "gain": False},
        },
        "feedforward": {
            "part": "glu",
            "hidden": c["decoder_ffn_embed_dim"],
            "activation": {"swish": "silu"}.get(c["activation_fn"], c["activation_fn"]),
        },
        "wiring": {"part": "pre" if before else "post", "norm": norm},
    }
    table = {
        "kind": "decoder", "width": width, "heads": heads, "depth": c["decoder_layers"],
        "norm": norm if before else "none", "embed": {"part": "tokens", "scale": not c["no_scale_embedding"]},
        "layer": [layer],
    }  # fmt: skip
    model = build({"vocab": c["vocab_size"], "model": table})
    names = {"embed.table": "embed_tokens.weight", "head.table": "output_projection.weight"}
    names |= {"stack.norm.inner.weight": "layer_norm.weight"} if before else {}
    for i in range(c["decoder_layers"]):
        ours, theirs = f"stack.layers.{i}", f"layers.{i}"
        for own, original in (("q", "q"), ("k", "k"), ("v", "v"), ("gate", "g"), ("out", "out")):
            names[f"{ours}.branches.mixer.{own}.weight"] = f"{theirs}.retention.{original}_proj.weight"
        for own, original in (("gate", "fc1"), ("into", "gate"), ("out", "fc2")):
            names[f"{ours}.branches.feedforward.{own}.weight"] = f"{theirs}.ffn.{original}.weight"
        for index, original in enumerate(("retention_layer_norm", "final_layer_norm")):
            names[f"{ours}.wiring.norms.{index}.inner.weight"] = f"{theirs}.{original}.weight"
    golden.load(model, names)
    tokens = golden.input("tokens")
    with watch(model, "stack.layers.0.out") as seen:
        logits = model(tokens)
    findings = golden.compare({"logits": logits, "hidden1": seen["stack.layers.0.out"][0]})
    with torch.no_grad():
        steps = stepped(model, tokens)
    return findings + golden.compare({"logits": steps}, gradients=False)


def stepped(model: Model, tokens: Tensor) -> Tensor:
    state, scores = model.start(len(tokens), tokens.shape[1]), []
    for here in cuts(tokens.shape[1]):
        y, state = model.step(tokens[:, here], state)
        scores.append(y)
    return torch.cat(scores, 1)


def pair(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}


Run = Callable[[dict[str, Tensor], Tensor | None], tuple[Tensor, Tensor]]


def recurrence(golden: Golden, names: tuple[str, ...], run: Run, outputs: tuple[str, ...] = ("out",)) -> list[Finding]:
    """A kernel at once, with the gradients, and again in pieces. `names` are the inputs that have positions; `run`
    takes them as (batch, heads, time, ...), and a state."""
    turned = golden.config["layout"] == "B,T,H,D"
    given = {name: golden.input(name).transpose(1, 2) if turned else golden.input(name) for name in names}
    y, state = run(given, None)
    findings = golden.compare(results(golden, y, state, turned, outputs))
    pieces, state = [], None
    with torch.no_grad():
        for here in cuts(given["k"].shape[2]):
            y, state = run({name: t[:, :, here] for name, t in given.items()}, state)
            pieces.append(y)
    assert state is not None
    return findings + golden.compare(results(golden, torch.cat(pieces, 2), state, turned, outputs), gradients=False)


def results(golden: Golden, y: Tensor, state: Tensor, turned: bool, outputs: tuple[str, ...]) -> dict[str, Tensor]:
    found = {name: y.transpose(1, 2) if turned else y for name in outputs}
    return found | ({"final_state": state} if "out.final_state" in golden else {})


def scaled(golden: Golden, q: Tensor) -> Tensor:
    return q * golden.config.get("scale", q.shape[-1] ** -0.5)


def gla(golden: Golden) -> list[Finding]:
    def run(t: dict[str, Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        return gated_linear_attention(scaled(golden, t["q"]), t["k"], t["v"], t["gk"], state)

    return recurrence(golden, ("q", "k", "v", "gk"), run)


def simple_gla(golden: Golden) -> list[Finding]:
    def run(t: dict[str, Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        return gated_linear_attention(scaled(golden, t["q"]), t["k"], t["v"], t["g"][..., None], state)

    return recurrence(golden, ("q", "k", "v", "g"), run, ("out", "chunk", "parallel"))


def rwkv6(golden: Golden) -> list[Finding]:
    def run(t: dict[str, Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        return gated_linear_attention(scaled(golden, t["q"]), t["k"], t["v"], t["w"], state, bonus=golden.input("u"))

    return recurrence(golden, ("q", "k", "v", "w"), run)


def delta_rule(golden: Golden) -> list[Finding]:
    def run(t: dict[str, Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        return delta(scaled(golden, t["q"]), t["k"], t["v"], t["beta"], state)

    return recurrence(golden, ("q", "k", "v", "beta"), run, ("out", "chunk"))


def retention(golden: Golden) -> list[Finding]:
    """Ours without its position and its norm, and with what keeps the weights near 1 left out: theirs has none."""
    heads = golden.input("q").shape[2 if golden.config["layout"] == "B,T,H,D" else 1]
    logs = torch.tensor(Retention(2 * heads, heads).log_decay)[:, None, None]

    def run(t: dict[str, Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        return gated_linear_attention(scaled(golden, t["q"]), t["k"], t["v"], logs, state)

    return recurrence(golden, ("q", "k", "v"), run)


def linear_attn(golden: Golden) -> list[Finding]:
    """Bare sums, and the same normalised, both with scaled queries; its epsilon is 1e-10."""
    turned = golden.config["layout"] == "B,T,H,D"
    q, k, v = (golden.input(n).transpose(1, 2) if turned else golden.input(n) for n in "qkv")
    heads = k.shape[1]
    mixer = Linear(heads, heads, k.shape[-1], v.shape[-1], feature="identity", eps=1e-10)
    plain, _ = gated_linear_attention(scaled(golden, q), k, v)
    normal, _ = mixer.attend_past(scaled(golden, q), k, v, None, None)
    found = {"out": plain, "out_normalized": normal}
    findings = golden.compare({name: y.transpose(1, 2) if turned else y for name, y in found.items()})
    state, pieces = Summary(torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1] + 1)), []
    with torch.no_grad():
        for here in cuts(k.shape[2]):
            y, state = mixer.attend_past(scaled(golden, q[:, :, here]), k[:, :, here], v[:, :, here], state, None)
            pieces.append(y)
    steps = torch.cat(pieces, 2)
    return findings + golden.compare({"out_normalized": steps.transpose(1, 2) if turned else steps}, gradients=False)


CASES = {
    "linear_attention": linear_attention,
    "linear_attention_causal": linear_attention,
    "linear_transformer": linear_transformer,
    "retnet": retnet,
    "fla_delta_rule": delta_rule,
    "fla_gla": gla,
    "fla_linear_attn": linear_attn,
    "fla_retention": retention,
    "fla_rwkv6": rwkv6,
    "fla_simple_gla": simple_gla,
}
