"""Lite Transformer: half of the channels to attention, half to a lightweight or dynamic convolution."""

from ast import literal_eval
from dataclasses import replace

from torch import Tensor

from regard.core import Context, Mixer
from regard.core.stack import Stack
from regard.verify.golden import Golden, in_steps
from regard.verify.laws import Finding


class ZeroedTooSoon(Mixer):
    """The original zeroes padding before the convolution's first map, so that the map's bias stands in the padding and
    reaches the last real positions; in the paper, and here, padding is zero at the convolution itself. Adapts ours."""

    def __init__(self, inner: Mixer):
        super().__init__()
        self.inner, self.width, self.streams = inner, inner.width, False

    def forward(self, x: Tensor, context: Context) -> Tensor:
        assert context.valid is not None
        return self.inner(x.masked_fill(~context.valid[..., None], 0.0), replace(context, valid=None))


def branch(text: str, decoder: bool, config: dict) -> tuple[dict, int]:
    """'attn:1:16:2' is a kind, a kernel size, a width and a number of heads."""
    kind, size, width, heads = text.split(":")
    if kind == "attn":
        return {"part": "attention", "heads": int(heads), "pattern": "causal" if decoder else "everything"}, int(width)
    sizes = config["decoder_kernel_size_list" if decoder else "encoder_kernel_size_list"]
    gated = kind == "dynamic" and config["decoder_glu" if decoder else "encoder_glu"]
    spec = {
        "part": "convolution",
        "kind": kind,
        "size": sizes[0] if size == "default" else int(size),
        "heads": int(heads),
        "causal": decoder,
        "into": "none" if not config["conv_linear"] else "glu" if gated else "linear",
        "out": config["conv_linear"],
        "softmax": config["weight_softmax"],
    }
    return spec, int(width)


def lsra(golden: Golden) -> list[Finding]:
    c = {key: read(value) for key, value in golden.config.items()}
    side = "decoder" if golden.system.endswith("_dec") else "encoder"
    branches = [branch(text, side == "decoder", c) for text in c[f"{side}_branch_type"]]
    width = c[f"{side}_embed_dim"]
    stack = Stack(
        width=width,
        depth=1,
        layer={
            "mixer": {
                "part": "split",
                "left": branches[0][0],
                "right": branches[1][0],
                "share": branches[0][1] / width,
            },
            "feedforward": {"part": "mlp", "hidden": c[f"{side}_ffn_embed_dim"], "activation": c["activation_fn"]},
            "wiring": "pre" if c[f"{side}_normalize_before"] else "post",
        },
    )
    golden.load(stack, names(branches))
    mixer = stack.layers[0].branches["mixer"]
    x = golden.input("x").transpose(0, 1)
    valid = None
    if "in.pad" in golden:
        valid = ~golden.input("pad")
        for place, (spec, _) in zip(("left", "right"), branches, strict=True):
            if spec["part"] == "convolution":
                setattr(mixer, place, ZeroedTooSoon(getattr(mixer, place)))
    context = Context.begin(*x.shape[:2], valid=valid)
    layer, inner = stack(x, context), mixer(x, context)
    findings = golden.compare({"layer_out": layer.transpose(0, 1), "lsra_out": inner.transpose(0, 1)})
    if side == "encoder":
        return findings
    steps = {"layer_out": in_steps(stack, x).transpose(0, 1), "lsra_out": in_steps(mixer, x).transpose(0, 1)}
    return findings + golden.compare(steps, gradients=False)


def names(branches: list[tuple[dict, int]]) -> dict:
    """Ours -> theirs."""
    made = {}
    pairs = {"branches.feedforward.into": "fc1", "branches.feedforward.out": "fc2"}
    pairs |= {"wiring.norms.0.inner": "self_attn_layer_norm", "wiring.norms.1.inner": "final_layer_norm"}
    for index, (place, (spec, _)) in enumerate(zip(("left", "right"), branches, strict=True)):
        ours, theirs = f"branches.mixer.{place}", f"self_attn.branches.{index}"
        if spec["part"] == "attention":
            pairs |= {f"{ours}.{letter}": f"{theirs}.{letter}_proj" for letter in "qkv"}
            pairs[f"{ours}.out"] = f"{theirs}.out_proj"
            continue
        pairs |= {f"{ours}.into": f"{theirs}.linear1", f"{ours}.out": f"{theirs}.linear2"} if spec["out"] else {}
        kernel = f"{theirs}.weight_linear.weight" if spec["kind"] == "dynamic" else f"{theirs}.weight"
        made[f"layers.0.{ours}.kernel.weight"] = kernel
    for ours, theirs in pairs.items():
        made |= {f"layers.0.{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}
    return made


def read(value):
    """The sidecar writes every option as text."""
    try:
        return literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError):
        return value


CASES = {f"lsra_{kind}_{side}": lsra for kind in ("dynamic", "lightweight") for side in ("enc", "dec")}
