"""BitNet b1.58 by Hugging Face, and the graph attention layers of PyTorch Geometric."""

from unittest import mock

import torch
from torch import Tensor

from regard.bases import edges
from regard.core import Context, Mixer, Pattern, build, find, part, watch
from regard.passes import bitnet as bits
from regard.passes.bitnet import BitLinear, PackedLinear
from regard.verify.golden import Golden
from regard.verify.laws import Finding, Subject, in_random_steps

NEAR = 3e-4  # of a tie: what float32 makes of numbers up to 127 after a few layers
TRIES = 16
ACTIVATIONS = {"relu2": "relu_squared", "silu": "silu", "gelu": "gelu", "relu": "relu"}


def bitlinear(golden: Golden) -> list[Finding]:
    """Also packed: the bytes are the same, and so is what the packed map gives."""
    c = golden.config
    map_ = BitLinear(c["in_features"], c["out_features"], "w.bias" in golden)
    golden.load(map_, {name: name for name, _ in map_.named_parameters()})
    x = golden.input("x")
    packed = PackedLinear.from_bit_linear(map_).eval()
    weights, size = map_.ternary()
    pairs = {
        "packed_weight": packed.packed,
        "ternary": weights,
        "weight_scale": 1 / size.reshape(1),  # theirs divides
        "out_packed": packed(x),
    }
    findings = [
        golden._finding(f"extra {name}", ours.double(), golden.extra(name).double(), 0.0)
        for name, ours in pairs.items()
    ]
    return findings + golden.compare({"out": map_(x)})


def bitnet(golden: Golden) -> list[Finding]:
    """An input that falls between two whole numbers may be rounded either way, by an error in its last bit: both are
    right, and all outputs and gradients must be those of one choice."""
    ties: list[float] = []
    findings = attempt(golden, ties, None)
    for tie in sorted(set(ties), key=lambda value: abs(value % 1 - 0.5))[:TRIES]:
        if all(finding.holds for finding in findings):
            break
        findings = min(findings, attempt(Golden(golden.path), [], tie), key=lambda some: sum(not f.holds for f in some))
    return findings


def attempt(golden: Golden, ties: list[float], other: float | None) -> list[Finding]:
    """ties: gathers inputs that fall between; other: the one that is rounded the other way."""
    plain = bits.quantize_input

    def quantize_input(x: Tensor) -> tuple[Tensor, Tensor]:
        quanta, step = plain(x)
        exact = x.detach() * step
        ties.extend(exact[(exact - exact.floor() - 0.5).abs() < NEAR].tolist())
        if other is not None:
            off = torch.where(quanta > exact, -1.0, 1.0) * ((exact - other).abs() < NEAR)
            quanta = quanta + off.detach()
        return quanta, step

    with mock.patch.object(bits, "quantize_input", quantize_input):
        return compared(golden)


def compared(golden: Golden) -> list[Finding]:
    c = golden.config
    norm = {"part": "rms", "eps": c["rms_norm_eps"]}
    rotary = {"part": "rotary", "base": c["rope_parameters"]["rope_theta"]}
    mixer = {"part": "attention", "kv_heads": c["num_key_value_heads"], "position": rotary, "norm": norm}
    if "head_dim" in c:
        mixer["dim"] = c["head_dim"]
    hidden, bend = c["intermediate_size"], ACTIVATIONS[c["hidden_act"]]
    layer = {
        "mixer": mixer | {"bias": "qkvo" if c["attention_bias"] else ""},
        "feedforward": {"part": "glu", "hidden": hidden, "activation": bend, "norm": norm},
        "wiring": {"part": "pre", "norm": norm},
    }
    table = {
        "kind": "decoder",
        "width": c["hidden_size"],
        "heads": c["num_attention_heads"],
        "depth": c["num_hidden_layers"],
        "norm": norm,
        "tie": "target" if c["tie_word_embeddings"] else "none",
        "embed": {"part": "tokens", "scale": False},
        "layer": layer,
        "passes": ["bitnet"],
    }
    model = build({"vocab": c["vocab_size"], "model": table})
    names = {"embed.table": "model.embed_tokens.weight", "stack.norm.inner.weight": "model.norm.weight"}
    if not c["tie_word_embeddings"]:
        names["head.table"] = "lm_head.weight"
    originals = {
        "mixer.q": "self_attn.q_proj", "mixer.k": "self_attn.k_proj", "mixer.v": "self_attn.v_proj",
        "mixer.out": "self_attn.o_proj", "mixer.norm.inner": "self_attn.attn_sub_norm",
        "feedforward.gate": "mlp.gate_proj", "feedforward.into": "mlp.up_proj", "feedforward.out": "mlp.down_proj",
        "feedforward.norm.inner": "mlp.ffn_sub_norm",
    }  # fmt: skip
    for i in range(c["num_hidden_layers"]):
        ours, theirs = f"stack.layers.{i}", f"model.layers.{i}"
        names |= {f"{ours}.branches.{a}.weight": f"{theirs}.{b}.weight" for a, b in originals.items()}
        names |= {
            f"{ours}.branches.{a}.bias": f"{theirs}.{b}.bias"
            for a, b in originals.items()
            if f"w.{theirs}.{b}.bias" in golden
        }
        names[f"{ours}.wiring.norms.0.inner.weight"] = f"{theirs}.input_layernorm.weight"
        names[f"{ours}.wiring.norms.1.inner.weight"] = f"{theirs}.post_attention_layernorm.weight"
    golden.load(model, names)
    tokens = golden.input("input_ids")
    with watch(model, "stack.layers.*.out") as seen:
        logits = model(tokens)
    hidden = {name: seen[f"stack.layers.{int(name[6:]) - 1}.out"][0] for name in outputs(golden) if name != "logits"}
    findings = golden.compare({"logits": logits, **hidden})
    with torch.no_grad():
        lengths = torch.full((len(tokens),), tokens.shape[1])
        steps = in_random_steps(Subject(model), tokens, lengths, None, max_step=5)
    return findings + golden.compare({"logits": steps}, gradients=False)


def outputs(golden: Golden) -> list[str]:
    return [name.removeprefix("out.") for name in golden.tensors if name.startswith("out.")]


def graph(golden: Golden) -> list[Finding]:
    """Theirs lists edges from a source to a target, which looks at it."""
    c, second = golden.config, golden.system.startswith("gatv2")
    mixer = part(
        Mixer,
        {
            "part": "gatv2" if second else "gat",
            "heads": c["heads"],
            "dim": c["out_channels"],
            "join": "concat" if c["concat"] else "mean",
            "slope": c["negative_slope"],
            "loops": c["add_self_loops"],
            "activation": "identity",
            "bias": "w.bias" in golden,
            **({"share": c.get("share_weights", False)} if second else {}),
        },
        width=c["in_channels"],
    )
    if second:
        names = {"score": lambda w: w("att")[0]}
        names |= {f"of_key.{kind}": f"lin_l.{kind}" for kind in ("weight", "bias")}
        names |= {f"of_query.{kind}": f"lin_r.{kind}" for kind in ("weight", "bias")}
    else:
        names = {"into.weight": "lin.weight", "score": lambda w: torch.stack((w("att_dst")[0], w("att_src")[0]), -1)}
    own = dict(mixer.named_parameters())
    golden.load(mixer, {name: take for name, take in (names | {"bias": "bias"}).items() if name in own})
    x, pairs = golden.input("x"), golden.input("edge_index")
    context = Context.begin(1, len(x), pattern=find(Pattern, "edges")(pairs.flip(0)))
    with watch(mixer, "weights") as seen:
        y = mixer(x[None], context)
    looks = edges.graph(mixer.pattern, context, mixer.loops)
    order = {pair: number for number, pair in enumerate(zip(looks.key.tolist(), looks.query.tolist(), strict=True))}
    wanted = [order[pair] for pair in zip(*golden.output("att_edges").tolist(), strict=True)]
    found = torch.stack((looks.key, looks.query))[:, wanted]
    return golden.compare({"out": y[0], "att": seen["weights"][0][wanted], "att_edges": found})


CASES = {"bitlinear": bitlinear, "bitnet": bitnet, "gat": graph, "gat_mean": graph, "gatv2": graph}
