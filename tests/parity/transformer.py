"""The original Transformer: torch's nn.Transformer."""

from regard.core import Context, Memory
from regard.core.stack import Place, Stack
from regard.verify.golden import Golden
from regard.verify.laws import Finding


def torch_attention(ours: str, theirs: str, width: int) -> dict:
    """in_proj is [q; k; v] stacked."""
    names = {}
    for index, letter in enumerate("qkv"):
        rows = slice(index * width, (index + 1) * width)
        names[f"{ours}.{letter}.weight"] = lambda w, rows=rows: w(f"{theirs}.in_proj_weight")[rows]
        names[f"{ours}.{letter}.bias"] = lambda w, rows=rows: w(f"{theirs}.in_proj_bias")[rows]
    return names | {f"{ours}.out.{kind}": f"{theirs}.out_proj.{kind}" for kind in ("weight", "bias")}


def pair(ours: str, theirs: str) -> dict:
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}


def nn_transformer(golden: Golden) -> list[Finding]:
    c = golden.config
    width, wiring = c["d_model"], {"part": "pre" if c["norm_first"] else "post", "norm": norm(c["layer_norm_eps"])}
    ff = {"part": "mlp", "hidden": c["dim_feedforward"], "activation": c["activation"]}
    common = {"width": width, "heads": c["nhead"], "norm": norm(c["layer_norm_eps"])}
    encoder = Stack(
        depth=c["num_encoder_layers"],
        layer={"mixer": {"part": "attention", "pattern": "everything"}, "feedforward": ff, "wiring": wiring},
        **common,
    )
    decoder = Stack(
        depth=c["num_decoder_layers"],
        layer={
            "mixer": {"part": "attention", "pattern": "causal"},
            "cross": {"part": "attention", "over": "memory"},
            "feedforward": ff,
            "wiring": wiring,
        },
        place=Place(memory=width),
        **common,
    )
    for side, stack in (("encoder", encoder), ("decoder", decoder)):
        names = pair("norm.inner", f"{side}.norm")
        branches = {"mixer": "self_attn", "cross": "multihead_attn"} if side == "decoder" else {"mixer": "self_attn"}
        for i in range(len(stack.layers)):
            ours, theirs = f"layers.{i}", f"{side}.layers.{i}"
            for branch, original in branches.items():
                names |= torch_attention(f"{ours}.branches.{branch}", f"{theirs}.{original}", width)
            names |= pair(f"{ours}.branches.feedforward.into", f"{theirs}.linear1")
            names |= pair(f"{ours}.branches.feedforward.out", f"{theirs}.linear2")
            for n in range(len(branches) + 1):
                names |= pair(f"{ours}.wiring.norms.{n}.inner", f"{theirs}.norm{n + 1}")
        golden.load(stack, names)
    src, tgt, padded = golden.input("src"), golden.input("tgt"), golden.input("src_key_padding_mask")
    memory = encoder(src, Context.begin(*src.shape[:2], valid=~padded))
    out = decoder(tgt, Context.begin(*tgt.shape[:2], memory=Memory(memory, ~padded)))
    return golden.compare({"out": out, "memory": memory})


def norm(eps: float) -> dict:
    return {"part": "layer", "eps": eps}


CASES = {"nn_transformer": nn_transformer, "nn_transformer_preln": nn_transformer}
