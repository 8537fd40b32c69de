"""Wirings: torchscale's encoder-decoder with post-norm, pre-norm, DeepNorm and sub-LN, and the authors' ResiDual."""

import torch
from torch import Tensor

from regard.core import Memory, Model, build
from regard.verify.golden import Golden
from regard.verify.laws import Finding


def torchscale(golden: Golden) -> list[Finding]:
    c = golden.config
    activation = {"swish": "silu"}.get(c["activation_fn"], c["activation_fn"])
    norm = {"part": "layer", "eps": c["layernorm_eps"]}
    names = {
        "source_embed.table": "encoder.embed_tokens.weight",
        "embed.table": "decoder.embed_tokens.weight",
    }
    sides = {}
    for side, ours in (("encoder", "encoder"), ("decoder", "stack")):
        before = c[f"{side}_normalize_before"]
        kind = "deepnorm" if c["deepnorm"] else "subln" if c["subln"] else "pre" if before else "post"
        branches = {"mixer": {"part": "attention", "pattern": "everything" if side == "encoder" else "causal"}}
        originals = {"mixer": "self_attn"}
        if side == "decoder":
            branches["cross"], originals["cross"] = {"part": "attention", "over": "memory"}, "encoder_attn"
        feedforward = {"part": "mlp", "hidden": c[f"{side}_ffn_embed_dim"], "activation": activation}
        sides[side] = {
            "depth": c[f"{side}_layers"],
            "heads": c[f"{side}_attention_heads"],
            "norm": norm if before else "none",
            "layer": [{**branches, "feedforward": feedforward, "wiring": {"part": kind, "norm": norm}}],
        }
        names |= pair(f"{ours}.norm.inner", f"{side}.layer_norm") if before else {}
        for i in range(c[f"{side}_layers"]):
            here, there = f"{ours}.layers.{i}", f"{side}.layers.{i}"
            names |= layer(here, there, originals, {"into": "ffn.fc1", "out": "ffn.fc2"})
            if kind == "subln":
                names |= pair(f"{here}.branches.mixer.norm.inner", f"{there}.self_attn.inner_attn_ln")
                names |= pair(f"{here}.branches.feedforward.norm.inner", f"{there}.ffn.ffn_layernorm")
    vocab = [golden.weight(f"{side}.embed_tokens.weight").shape[0] for side in sides]
    table = {
        "kind": "encoder-decoder",
        "width": c["encoder_embed_dim"],
        "embed": {"part": "tokens", "scale": False},
        "tie": "target",  # the original stops before its head; ours then has no weights of its own
    }
    model = build({"vocab": vocab, "model": table | sides})
    golden.load(model, names)
    memory = model.encode(golden.input("src"))
    whole, _ = run(model, golden.input("tgt"), memory, cut=False)
    findings = golden.compare({"encoder_out": memory.x, "decoder_out": whole})
    with torch.no_grad():
        steps, _ = run(model, golden.input("tgt"), memory, cut=True)
    return findings + golden.compare({"decoder_out": steps}, gradients=False)


def residual_dual(golden: Golden) -> list[Finding]:
    c, pad = golden.config, 1  # fairseq's dictionary
    names = {"source_embed.table": "encoder.embed_tokens.weight"}
    sides = {}
    for side, short, ours in (("encoder", "enc", "encoder"), ("decoder", "dec", "stack")):
        branches = {"mixer": {"part": "attention", "pattern": "everything" if side == "encoder" else "causal"}}
        originals = {"mixer": "self_attn"}
        if side == "decoder":
            branches["cross"], originals["cross"] = {"part": "attention", "over": "memory"}, "encoder_attn"
        scale, alpha = c.get(f"{short}_res_scale", 1.0), c.get(f"{short}_alpha", 1.0)
        wiring = {"part": "residual", "scale": scale, "alpha": alpha}
        sides[side] = {
            "depth": c[f"{short}_layers"],
            "norm": {"part": "layer", "eps": 1e-7},
            "layer": [{**branches, "feedforward": {"part": "mlp", "hidden": c["ffn"]}, "wiring": wiring}],
        }
        names |= pair(f"{ours}.norm.inner", f"{side}.layer_norm")
        for i in range(c[f"{short}_layers"]):
            names |= layer(f"{ours}.layers.{i}", f"{side}.layers.{i}", originals, {"into": "fc1", "out": "fc2"})
    position = {"part": "sinusoidal", "layout": "halves", "spread": "ends", "offset": pad + 1}
    table = {
        "kind": "encoder-decoder",
        "width": c["dim"],
        "heads": c["heads"],
        "embed": {"part": "tokens", "position": position},
        "tie": "all",
    }
    model = build({"vocab": golden.weight("encoder.embed_tokens.weight").shape[0], "model": table | sides})
    golden.load(model, names)
    source, target = golden.input("src"), golden.input("prev")
    valid = source != pad
    # fairseq sets the vectors of padding to zero, and the golden looks at what becomes of them.
    model.source_embed.register_forward_hook(lambda embed, given, x: x * valid[..., None])
    memory = model.encode(source, valid)
    _, logits = run(model, target, memory, cut=False)
    findings = golden.compare({"logits": logits, "encoder_out": memory.x.transpose(0, 1)})
    with torch.no_grad():
        _, steps = run(model, target, memory, cut=True)
    return findings + golden.compare({"logits": steps}, gradients=False)


def run(model: Model, tokens: Tensor, memory: Memory, cut: bool) -> tuple[Tensor, Tensor]:
    """What the head is given and what it gives, (batch, time, ...): at once, or in steps of random sizes."""
    given: list[Tensor] = []
    hook = model.head.register_forward_pre_hook(lambda head, inputs: given.append(inputs[0]))
    scores = []
    if cut:
        time = tokens.shape[1]
        state, begin = model.start(len(tokens), time, memory=memory), 0
        while begin < time:
            end = begin + int(torch.randint(1, 4, ()))
            y, state = model.step(tokens[:, begin:end], state)
            scores.append(y)
            begin = end
    else:
        scores.append(model(tokens, memory=memory))
    hook.remove()
    return torch.cat(given, 1), torch.cat(scores, 1)


def layer(ours: str, theirs: str, attentions: dict[str, str], maps: dict[str, str]) -> dict[str, str]:
    """Attentions, feed-forward and their norms, as fairseq and its heirs name them."""
    names = {}
    norms = [f"{original}_layer_norm" for original in attentions.values()] + ["final_layer_norm"]
    for branch, original in attentions.items():
        for letter in ("q", "k", "v", "out"):
            names |= pair(f"{ours}.branches.{branch}.{letter}", f"{theirs}.{original}.{letter}_proj")
    for own, original in maps.items():
        names |= pair(f"{ours}.branches.feedforward.{own}", f"{theirs}.{original}")
    for index, original in enumerate(norms):
        names |= pair(f"{ours}.wiring.norms.{index}.inner", f"{theirs}.{original}")
    return names


def pair(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}


CASES = {
    "wiring_deepnorm": torchscale,
    "wiring_postln": torchscale,
    "wiring_preln": torchscale,
    "wiring_subln": torchscale,
    "residual_dual": residual_dual,
}
