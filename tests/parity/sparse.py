"""Patterns and kernels without weights: OpenAI's sparse attention, and torch's grouped-query attention."""

import torch
from torch import Tensor

from regard.bases import Attend, AttentionMask
from regard.core import Pattern, Position
from regard.parts.scores.scaled_dot import ScaledDot
from regard.pattern.algebra import cycle
from regard.verify.golden import Golden
from regard.verify.laws import Finding


def attend(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> Tensor:
    """q (batch, heads, n, dim), k and v (batch, kv_heads, m, dim)"""
    see = AttentionMask(
        pattern, torch.arange(q.shape[2])[None], torch.arange(k.shape[2])[None], from_start=q.shape[2] == k.shape[2]
    )
    score = ScaledDot(q.shape[-1])
    return Attend()(score.query(q), score.key(k), v, see, score, Position())


def sparse(golden: Golden) -> list[Finding]:
    """A window of the original counts whole blocks, and a summary is `vertsize` of them."""
    c = golden.config
    context, block = c["local_attn_ctx"], c.get("blocksize") or 1
    summary, turns = (c.get("vertsize") or 1) * block, c.get("num_verts") or 1
    text = {
        "all": "causal",
        "local": f"causal & window({context})",
        "strided": f"causal & stride({context})",
        "fixed": f"causal & fixed({context // block * block}, {summary}, {turns})",
    }[c["mode"]]
    pattern = Pattern.parse(text)
    q, k, v = (golden.input(name).unflatten(-1, (c["heads"], -1)).transpose(1, 2) for name in "qkv")
    y = attend(q, k, v, pattern).transpose(1, 2).flatten(-2)
    allowed = golden.extra("allowed").bool()  # (heads, n, n)
    ours = cycle(pattern.mask(q.shape[2]), c["heads"]).expand_as(allowed)
    wrong = float((ours != allowed).sum())
    return [Finding(f"{golden.path.stem} pattern", wrong, 0.0, text), *golden.compare({"out": y})]


def gqa_sdpa(golden: Golden) -> list[Finding]:
    pattern = Pattern.parse("causal" if golden.config["causal"] else "everything")
    return golden.compare({"out": attend(golden.input("q"), golden.input("k"), golden.input("v"), pattern)})


CASES = {"sparse_local": sparse, "sparse_strided": sparse, "sparse_fixed": sparse, "gqa_sdpa": gqa_sdpa}
