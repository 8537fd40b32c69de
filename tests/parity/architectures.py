"""Other architectures: the Evolved Transformer (the authors' tensor2tensor, and a port of its encoder to PyTorch),
multi-view decoding, and the authors' FLOATER."""

from ast import literal_eval
from dataclasses import replace

import torch
from torch import Tensor, nn

from regard.core import Context, Memory, Mixer, Place
from regard.core.stack import Stack
from regard.verify.golden import Golden, in_steps
from regard.verify.laws import Finding

SIDES = ("left", "right", "last")


def dense(ours: str, theirs: str) -> dict:
    """tensor2tensor writes kernels as (in, out)."""
    return {f"{ours}.weight": lambda w: w(f"{theirs}/kernel").mT, f"{ours}.bias": f"{theirs}/bias"}


def norm(ours: str, theirs: str) -> dict:
    theirs = f"{theirs}/layer_norm/layer_norm_"
    return {f"{ours}.inner.weight": f"{theirs}scale", f"{ours}.inner.bias": f"{theirs}bias"}


def attention(ours: str, theirs: str) -> dict:
    pairs = (("q", "q"), ("k", "k"), ("v", "v"), ("out", "output_transform"))
    return {
        f"{ours}.{mine}.weight": lambda w, name=name: w(f"{theirs}/multihead_attention/{name}/kernel").mT
        for mine, name in pairs
    }


def plain(ours: str, theirs: str) -> dict:
    """A convolution: (size, in, out) there, (out, in, size) here."""
    return {
        f"{ours}.kernel.weight": lambda w: w(f"{theirs}/kernel").permute(2, 1, 0),
        f"{ours}.kernel.bias": f"{theirs}/bias",
    }


def separable(ours: str, theirs: str) -> dict:
    return {
        f"{ours}.kernel.weight": lambda w: w(f"{theirs}/depthwise_kernel").permute(1, 2, 0),
        f"{ours}.map.weight": lambda w: w(f"{theirs}/pointwise_kernel")[0].mT,
        f"{ours}.map.bias": f"{theirs}/bias",
    }


def evolved_layer(golden: Golden, table: dict, depth: int) -> Stack:
    c = golden.config
    assert (c["layer_preprocess_sequence"], c["layer_postprocess_sequence"], c["norm_type"]) == ("n", "da", "layer")
    assert c["self_attention_type"] == "dot_product"
    return Stack(
        width=c["hidden_size"],
        heads=c["num_heads"],
        depth=depth,
        norm={"part": "layer", "eps": c["norm_epsilon"]},
        layer=table | {"wiring": {"part": "pre", "norm": {"part": "layer", "eps": c["norm_epsilon"]}}},
    )


def channels(c: dict) -> int | None:
    """The head dimension, where it is not width / heads."""
    assert c["attention_key_channels"] == c["attention_value_channels"]
    return c["attention_key_channels"] // c["num_heads"] or None


def gone(golden: Golden) -> None:
    """Padding is a float there, and its gradient, which is -1e9 times something, says nothing: what is real is no
    quantity here."""
    golden.tensors.pop("grad.in.padding", None)


class Unaware(Mixer):
    """The original's gate knows nothing of padding, and the golden looks at what becomes of padded columns; here nobody
    does, and a convolution puts zeros there. Adapts ours."""

    def __init__(self, inner: Mixer):
        super().__init__()
        self.inner, self.width, self.streams = inner, inner.width, False

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.inner(x, replace(context, valid=None))


def evolved_encoder(golden: Golden) -> list[Finding]:
    c = golden.config
    middle = {"part": "layer", "eps": c["norm_epsilon"]}
    table = {
        "gate": {"part": "convolution", "kind": "gated", "size": 1, "causal": False, "into": "none", "out": False},
        "near": {
            "part": "conv_branches",
            "causal": False,
            "norm": middle,
            "left": {"times": 4, "activation": "relu"},
            "right": {"size": 3, "times": 0.5, "activation": "relu"},
            "last": {"size": 9, "times": 0.5, "separable": True},
        },
        "mixer": {"part": "attention", "pattern": "everything", "bias": False, "dim": channels(c)},
        "feedforward": {"part": "mlp", "hidden": 4 * c["hidden_size"]},
    }
    depth = c["num_encoder_layers"] or c["num_hidden_layers"]
    stack = evolved_layer(golden, table, depth)
    names = norm("norm", "encoder/layer_prepostprocess")
    for i in range(depth):
        ours, theirs = f"layers.{i}.branches", f"encoder/layer_{i}"
        gate, near = f"{theirs}/gated_linear_unit", f"{theirs}/conv_branches"
        for index, scope in enumerate((gate, near, f"{theirs}/self_attention", f"{theirs}/dense_layers")):
            names |= norm(f"layers.{i}.wiring.norms.{index}", f"{scope}/layer_prepostprocess")
        names |= {
            f"{ours}.gate.kernel.weight": lambda w, at=gate: torch.cat(
                [w(f"{at}/dense/kernel"), w(f"{at}/dense_1/kernel")], 1
            ).mT[..., None],
            f"{ours}.gate.kernel.bias": lambda w, at=gate: torch.cat([w(f"{at}/dense/bias"), w(f"{at}/dense_1/bias")]),
            f"{ours}.near.left.kernel.weight": lambda w, at=near: w(f"{at}/dense/kernel").mT[..., None],
            f"{ours}.near.left.kernel.bias": f"{near}/dense/bias",
        }
        names |= plain(f"{ours}.near.right", f"{near}/standard_conv_3x1")
        names |= norm(f"{ours}.near.norm", f"{near}/layer_prepostprocess_1")
        names |= separable(f"{ours}.near.last", f"{near}/separable_conv_9x1")
        names |= attention(f"{ours}.mixer", f"{theirs}/self_attention")
        names |= dense(f"{ours}.feedforward.into", f"{theirs}/dense_layers/dense")
        names |= dense(f"{ours}.feedforward.out", f"{theirs}/dense_layers/dense_1")
    golden.load(stack, names)
    for layer in stack.layers:
        layer.branches["gate"] = Unaware(layer.branches["gate"])
    gone(golden)
    x, padding = golden.input("x"), golden.input("padding")
    return golden.compare({"out": stack(x, Context.begin(*x.shape[:2], valid=padding == 0))})


def evolved_decoder(golden: Golden) -> list[Finding]:
    c = golden.config
    look = {"part": "attention", "bias": False, "dim": channels(c)}
    many = min(2 * c["num_heads"], 16)
    table = {
        "both": {
            "part": "sum",
            "left": look | {"heads": many, "dim": c["attention_key_channels"] // many or None},
            "right": look | {"over": "memory"},
        },
        "near": {
            "part": "conv_branches",
            "norm": {"part": "layer", "eps": c["norm_epsilon"]},
            "left": {"size": 11, "times": 2, "separable": True, "activation": "relu"},
            "right": {"size": 7, "times": 0.5, "separable": True},
            "last": {"size": 7, "separable": True},
        },
        "mixer": look,
        "cross": look | {"over": "memory"},
        "feedforward": {
            "part": "mlp",
            "hidden": 4 * c["hidden_size"],
            "activation": "silu",
            "norm": {"part": "layer", "eps": c["norm_epsilon"]},
        },
    }
    depth = c["num_decoder_layers"] or c["num_hidden_layers"]
    stack = evolved_layer(golden, table, depth)
    names = norm("norm", "decoder/layer_prepostprocess")
    for i in range(depth):
        ours, theirs = f"layers.{i}.branches", f"decoder/layer_{i}"
        first, near, last = f"{theirs}/16_head_self_attention", f"{theirs}/conv_branches", f"{theirs}/dense_layers"
        scopes = (first, near, f"{theirs}/self_attention", f"{theirs}/second_attend_to_encoder", last)
        for index, scope in enumerate(scopes):
            names |= norm(f"layers.{i}.wiring.norms.{index}", f"{scope}/layer_prepostprocess")
        names |= attention(f"{ours}.both.left", first)
        names |= attention(f"{ours}.both.right", f"{theirs}/first_attend_to_encoder")
        names |= attention(f"{ours}.mixer", f"{theirs}/self_attention")
        names |= attention(f"{ours}.cross", f"{theirs}/second_attend_to_encoder")
        for side, scope in zip(SIDES, ("conv11x1", "conv_7x1_1", "conv_7x1_2"), strict=True):
            names |= separable(f"{ours}.near.{side}", f"{near}/separable_{scope}")
        names |= norm(f"{ours}.near.norm", f"{near}/layer_prepostprocess_1")
        names |= dense(f"{ours}.feedforward.into", f"{last}/dense") | dense(
            f"{ours}.feedforward.out", f"{last}/dense_1"
        )
        names |= norm(f"{ours}.feedforward.norm", f"{last}/layer_prepostprocess_1")
    golden.load(stack, names)
    gone(golden)
    x = golden.input("x")
    memory = Memory(golden.input("memory"), golden.input("padding") == 0)
    findings = golden.compare({"out": stack(x, Context.begin(*x.shape[:2], memory=memory))})
    return findings + golden.compare({"out": in_steps(stack, x, memory)}, gradients=False)


def evolved_pt(golden: Golden) -> list[Finding]:
    """Its first gate sees three positions, where the authors' sees one; and its depthwise kernel has a bias of its own,
    which the map after it makes superfluous: ours is given one here."""
    c = golden.config
    width, times = c["d_model"], c["ff_hidden"]
    size = golden.weight("glu.gated_convs.0.conv.weight").shape[-1]
    table = {
        "gate": {"part": "convolution", "kind": "gated", "size": size, "causal": False, "into": "none", "out": False},
        "near": {
            "part": "conv_branches",
            "causal": False,
            "left": {"times": times, "activation": "relu"},
            "right": {"size": 3, "times": 0.5, "activation": "relu"},
            "last": {"size": 9, "times": 0.5, "separable": True},
        },
        "mixer": {"part": "attention", "pattern": "everything"},
        "feedforward": {"part": "mlp", "hidden": times * width},
        "wiring": "pre",
    }
    stack = Stack(width=width, heads=c["heads"], depth=1, layer=table)
    last = stack.layers[0].branches["near"].last
    last.kernel = nn.Conv1d(times * width, times * width, last.size, groups=times * width)
    pairs = {
        "gate.kernel": "glu.gated_convs.0.conv",
        "near.right.kernel": "right_net.0",
        "near.norm.inner": "mid_layer_norm",
        "near.last.kernel": "sep_conv.depth_wise",
        "mixer.out": "attention.out_proj",
        "feedforward.into": "feed_forward.0",
        "feedforward.out": "feed_forward.2",
    }
    names = {f"branches.{a}.{kind}": f"{b}.{kind}" for a, b in pairs.items() for kind in ("weight", "bias")}
    names |= {
        f"wiring.norms.{i}.inner.{kind}": f"layer_norms.{i}.{kind}" for i in range(4) for kind in ("weight", "bias")
    }
    names |= {
        "branches.near.left.kernel.weight": lambda w: w("left_net.0.weight")[..., None],
        "branches.near.left.kernel.bias": "left_net.0.bias",
        "branches.near.last.map.weight": lambda w: w("sep_conv.point_wise.weight")[..., 0],
        "branches.near.last.map.bias": "sep_conv.point_wise.bias",
    }
    for index, letter in enumerate("qkv"):
        for kind in ("weight", "bias"):
            names[f"branches.mixer.{letter}.{kind}"] = lambda w, i=index, kind=kind: w(f"attention.in_proj_{kind}")[
                i * width : (i + 1) * width
            ]
    golden.load(stack, {f"layers.0.{ours}": theirs for ours, theirs in names.items()})
    x = golden.input("x")
    return golden.compare({"out": stack(x, Context.begin(*x.shape[:2]))})


def torch_layer(ours: str, theirs: str, width: int, attentions: dict[str, str]) -> dict:
    """nn.TransformerEncoderLayer and DecoderLayer."""
    names = {}
    for kind in ("weight", "bias"):
        for mine, name in (("into", "linear1"), ("out", "linear2")):
            names[f"{ours}.branches.feedforward.{mine}.{kind}"] = f"{theirs}.{name}.{kind}"
        for index in range(len(attentions) + 1):
            names[f"{ours}.wiring.norms.{index}.inner.{kind}"] = f"{theirs}.norm{index + 1}.{kind}"
        for mine, name in attentions.items():
            names[f"{ours}.branches.{mine}.out.{kind}"] = f"{theirs}.{name}.out_proj.{kind}"
            for i, letter in enumerate("qkv"):
                names[f"{ours}.branches.{mine}.{letter}.{kind}"] = lambda w, at=f"{name}.in_proj_{kind}", i=i: w(
                    f"{theirs}.{at}"
                )[i * width : (i + 1) * width]
    return names


def multiview_primitives(golden: Golden) -> list[Finding]:
    """One model whose layers look elsewhere for each output, as the golden's gradients are of all of them together."""
    c = golden.config
    width, depth = c["D"], c["N"]
    feedforward = {"part": "mlp", "hidden": golden.weight("encoder.0.linear1.weight").shape[0]}
    encoder = Stack(
        width=width,
        heads=c["H"],
        depth=depth,
        layer={"mixer": {"part": "attention", "pattern": "everything"}, "feedforward": feedforward, "wiring": "post"},
    )
    decoder = Stack(
        width=width,
        heads=c["H"],
        depth=depth,
        layer={
            "mixer": "attention",
            "cross": {"part": "view", "mixer": {"part": "attention", "over": "memory"}},
            "feedforward": feedforward,
            "wiring": "post",
        },
        place=Place("decoder", depth, depth, width),
    )
    sides = {"encoder": {"mixer": "self_attn"}, "decoder": {"mixer": "self_attn", "cross.mixer": "multihead_attn"}}
    for stack, (side, attentions) in zip((encoder, decoder), sides.items(), strict=True):
        layers = [torch_layer(f"layers.{i}", f"{side}.{i}", width, attentions) for i in range(depth)]
        golden.load(stack, {ours: theirs for layer in layers for ours, theirs in layer.items()})
    source, target = golden.input("src"), golden.input("tgt")
    x, _, views = encoder.forward_with_states(source, Context.begin(*source.shape[:2]), layer_outputs=True)
    memory = Memory(x, layer_outputs=views)
    whole, steps = {}, {}
    for name, chosen in c["view_maps"].items():
        for layer, index in zip(decoder.layers, chosen, strict=True):
            layer.branches["cross"].layer = index
        whole[f"out_{name}"] = decoder(target, Context.begin(*target.shape[:2], memory=memory))
        steps[f"out_{name}"] = in_steps(decoder, target, memory)
    return golden.compare(whole) + golden.compare(steps, gradients=False)


def floater(golden: Golden) -> list[Finding]:
    """Padding is a token there, number 1, whose vector does not learn."""
    c = {key: read(value) for key, value in golden.config.items()}
    assert c["method"] == "rk4"
    assert c["no_token_positional_embeddings"]
    width, depth, before = c["encoder_embed_dim"], c["encoder_layers"], c["encoder_normalize_before"]
    stack = Stack(
        width=width,
        heads=c["encoder_attention_heads"],
        depth=depth,
        position={"part": "floater", "dt": c["time_dt"], "step": c["step_size"] / c["time_dt"]},
        norm="layer" if before else "none",
        layer={
            "mixer": {"part": "attention", "pattern": "everything", "position": "shared", "bias": "o"},
            "feedforward": {"part": "mlp", "hidden": c["encoder_ffn_embed_dim"], "activation": c["activation_fn"]},
            "wiring": "pre" if before else "post",
        },
    )
    pairs = {"position.flow.into": "proj_flow.layers.0.linear", "position.flow.out": "proj_flow.layers.2.linear"}
    names: dict = {}
    if before:
        pairs["norm.inner"] = "layer_norm"
    for i in range(depth):
        ours, theirs = f"layers.{i}.branches", f"layers.{i}"
        pairs |= {f"{ours}.mixer.out": f"{theirs}.self_attn.out_proj"}
        pairs |= {f"{ours}.feedforward.into": f"{theirs}.fc1", f"{ours}.feedforward.out": f"{theirs}.fc2"}
        for index, name in enumerate(("self_attn_layer_norm", "final_layer_norm")):
            pairs[f"layers.{i}.wiring.norms.{index}.inner"] = f"{theirs}.{name}"
        for index, letter in enumerate("qkv"):
            names[f"{ours}.mixer.{letter}.weight"] = lambda w, at=theirs, index=index: w(
                f"{at}.self_attn.in_proj_weights"
            )[index * width : (index + 1) * width]
        names[f"{ours}.mixer.position.begin" if i else "position.begin"] = lambda w, i=i: w("proj_bias")[:, i]
    names |= {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in pairs.items() for kind in ("weight", "bias")}
    golden.load(stack, names)
    embed = nn.Embedding(*golden.weight("embed_tokens.weight").shape, padding_idx=1)
    golden.load(embed, {"weight": "embed_tokens.weight"})
    tokens = golden.input("src")
    out = stack(embed(tokens) * width**0.5, Context.begin(*tokens.shape, valid=tokens != embed.padding_idx))
    parts = [layer.branches["mixer"].position for layer in stack.layers]
    moved = [torch.stack([p.vectors(role, tokens.shape[1]) for p in parts], 1) for role in range(3)]
    findings = golden.compare({"encoder_out": out.transpose(0, 1), "bias_traj": torch.stack(moved, 1)})
    with torch.no_grad():  # where they are kept
        moved = [torch.stack([p.vectors(role, tokens.shape[1]) for p in parts], 1) for role in range(3)]
    return findings + golden.compare({"bias_traj": torch.stack(moved, 1)}, gradients=False)


def read(value):
    """The sidecar writes some options as text."""
    try:
        return literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError):
        return value


CASES = {
    "floater": floater,
    "evolved_encoder": evolved_encoder,
    "evolved_decoder": evolved_decoder,
    "evolved_pt": evolved_pt,
    "multiview_primitives": multiview_primitives,
}
