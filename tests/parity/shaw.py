"""Relative position representations: OpenNMT-py, with one table for keys and values, and the authors' tensor2tensor."""

from regard.core import Context, watch
from regard.parts.mixers.attention import Attention
from regard.parts.patterns.matrix import Matrix
from regard.verify.golden import Golden
from regard.verify.laws import Finding


def shaw_relative(golden: Golden) -> list[Finding]:
    c = golden.config
    attention = Attention(
        c["dim"],
        c["heads"],
        pattern="causal" if c["causal"] else "everything",
        position={"part": "shaw", "clip": c["max_relative"], "shared": True},
    )
    names = {"position.keys": "relative_positions_embeddings.weight"}
    for ours, theirs in (("q", "linear_query"), ("k", "linear_keys"), ("v", "linear_values"), ("out", "final_linear")):
        names |= {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}
    golden.load(attention, names)
    x = golden.input("x")
    seen = Matrix(~golden.input("mask")[:, 0])  # padded queries look too, and their output is compared
    with watch(attention, "attend.weights") as weights:
        out = attention(x, Context.begin(*x.shape[:2], pattern=seen))
    return golden.compare({"out": out, "attn": weights["attend.weights"][0]})


def shaw_t2t(golden: Golden) -> list[Finding]:
    """Dense kernels are (in, out) there."""
    c = golden.config
    attention = Attention(
        c["dim"],
        c["heads"],
        pattern="causal" if c["causal"] else "everything",
        position={"part": "shaw", "clip": c["max_relative_position"]},
        bias=False,
    )
    table = "shaw/dot_product_attention_relative/relative_positions_{}/embeddings"
    names = {f"position.{which}": table.format(which) for which in ("keys", "values")}
    for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "output_transform")):
        names[f"{ours}.weight"] = lambda w, theirs=theirs: w(f"shaw/{theirs}/kernel").mT
    golden.load(attention, names)
    x = golden.input("x")
    return golden.compare({"out": attention(x, Context.begin(*x.shape[:2]))})


CASES = {
    "shaw_relative": shaw_relative,
    "shaw_relative_causal": shaw_relative,
    "shaw_t2t": shaw_t2t,
    "shaw_t2t_causal": shaw_t2t,
}
