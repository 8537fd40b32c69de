"""Systems that are the Transformer with one idea more: multi-query attention (GPTBigCode)."""

import torch

from regard.core import build
from regard.verify.golden import Golden
from regard.verify.laws import Finding, Subject, stepwise

BENDS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}


def pair(ours: str, theirs: str) -> dict:
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}


def mqa_bigcode(golden: Golden) -> list[Finding]:
    c = golden.config
    width, dim = c["n_embd"], c["n_embd"] // c["n_head"]
    norm = {"part": "layer", "eps": c["layer_norm_epsilon"]}
    score = {"part": "scaled_dot", "scale": dim**-0.5 if c["scale_attn_weights"] else 1.0}
    bend = BENDS[c["activation_function"]]
    model = build(
        {
            "model": {
                "kind": "decoder",
                "width": width,
                "heads": c["n_head"],
                "depth": c["n_layer"],
                "norm": norm,
                "tie": "target" if c["tie_word_embeddings"] else "none",
                "embed": {
                    "part": "tokens",
                    "scale": False,
                    "position": {"part": "learned", "length": c["n_positions"]},
                },
                "layer": [
                    {
                        "mixer": {"part": "attention", "kv_heads": 1, "score": score},
                        "feedforward": {"part": "mlp", "hidden": c["n_inner"], "activation": bend},
                        "wiring": {"part": "pre", "norm": norm},
                    }
                ],
            }
        },
        vocab=c["vocab_size"],
    )
    names = {"embed.table": "transformer.wte.weight", "embed.position.table": "transformer.wpe.weight"}
    names |= pair("stack.norm.inner", "transformer.ln_f")
    rows = {"q": slice(0, width), "k": slice(width, width + dim), "v": slice(width + dim, None)}  # of the fused map
    for i in range(c["n_layer"]):
        ours, theirs = f"stack.layers.{i}", f"transformer.h.{i}"
        for letter, some in rows.items():
            for kind in ("weight", "bias"):
                fused = f"{theirs}.attn.c_attn.{kind}"
                names[f"{ours}.branches.mixer.{letter}.{kind}"] = lambda w, fused=fused, some=some: w(fused)[some]
        names |= pair(f"{ours}.branches.mixer.out", f"{theirs}.attn.c_proj")
        names |= pair(f"{ours}.branches.feedforward.into", f"{theirs}.mlp.c_fc")
        names |= pair(f"{ours}.branches.feedforward.out", f"{theirs}.mlp.c_proj")
        names |= pair(f"{ours}.wiring.norms.0.inner", f"{theirs}.ln_1")
        names |= pair(f"{ours}.wiring.norms.1.inner", f"{theirs}.ln_2")
    if not c["tie_word_embeddings"]:
        names["head.table"] = "lm_head.weight"
    golden.load(model, names)
    tokens = golden.input("input_ids")
    findings = golden.compare({"logits": model(tokens)})
    with torch.no_grad():
        lengths = torch.full((len(tokens),), tokens.shape[1])
        steps = stepwise(Subject(model), tokens, lengths, None, most=5)
    return findings + golden.compare({"logits": steps}, gradients=False)


CASES = {"mqa_bigcode": mqa_bigcode}
