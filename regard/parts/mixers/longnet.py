"""Dilated attention: branches attend to every r-th position of ever longer segments, so that near positions are seen
densely and far ones sparsely, at a cost that is linear in the length.

    branch i     head h attends among the positions = h mod r_i (modulo r_i) of each segment of w_i: y_i
    together     y = sum of share_i y_i,      share_i = sum of exp(scores_i) / the same sum over all branches

Ding et al. 2023, "LongNet: Scaling Transformers to 1,000,000,000 Tokens", arXiv:2307.02486. So y is one softmax, in
which a key counts once per branch that reaches it: that is how it steps, with a cache of the longest segment.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.bases import Attend, AttentionMask, blocks
from regard.bases.multihead import MultiHead
from regard.core import Norm, Pattern, Place, Position, Score, UserError, find
from regard.ops.join import merge
from regard.pattern.algebra import Both, cycle
from regard.pattern.analysis import first_blind_query
from regard.schema import name_of


class LongNet(MultiHead):
    """segments: segment length of each branch: [2048, 4096, 8192].
    rates:    dilation of each branch: [1, 2, 4]. One must be 1.
    causal:   attend to earlier positions only; false in an encoder.
    offsets:  "turns": head h starts at position h modulo the rate, as in the paper; "groups": neighboring heads start
              at the same position, as in torchscale and in models trained with it.
    shares:   "learned": gradients flow through the branches' shares; "constant": for union sequences they do not, as in
              torchscale.
    The other arguments are those of attention.
    """

    examples = (
        {"segments": [4, 8, 16], "rates": [1, 2, 4]},
        {"segments": [7, 12], "rates": [1, 5], "position": "alibi", "offsets": "groups"},
        {"segments": [3, 5, 32], "rates": [1, 2, 3], "position": "rotary", "kv_heads": 1},
        {"segments": [4, 9], "rates": [1, 3], "causal": False},
    )

    def __init__(
        self,
        width: int,
        heads: int,
        segments: list,
        rates: list,
        causal: bool = True,
        offsets: str = "turns",
        shares: str = "learned",
        kv_heads: int | None = None,
        dim: int | None = None,
        position: Position | str | dict = "none",
        score: Score | str | dict = "scaled_dot",
        bias: bool | str = True,
        norm: Norm | str | dict = "none",
        qk_norm: Norm | str | dict = "none",
        weight_dropout: float = 0.0,
        kernel: str = "auto",
        place: Place | None = None,
    ):
        if shares not in ("learned", "constant"):
            raise UserError(f"shares must be 'learned' or 'constant', not '{shares}'")
        branches = _branches(segments, rates, heads, offsets, causal)
        union = branches[0]
        for branch in branches[1:]:
            union = union | branch
        blind_at = first_blind_query(union, 2 * max(segments))
        if blind_at is not None:
            raise UserError(
                f"segments {segments} with rates {rates} leave position {blind_at} with nothing to attend to: give a "
                "branch rate 1"
            )
        super().__init__(
            width,
            heads,
            kv_heads=kv_heads,
            dim=dim,
            pattern=union,
            position=position,
            score=score,
            bias=bias,
            norm=norm,
            qk_norm=qk_norm,
            weight_dropout=weight_dropout,
            place=place,
        )
        if self.position.acts("output_bias"):
            raise UserError(
                f"position '{name_of(self.position)}' needs the attention weights, which branches do not have"
            )
        self.position = WithKeyCounts(self.position, branches, heads)
        self.attend = BranchAttend(branches, union, shares == "learned", kernel, weight_dropout)


def _branches(segments: list, rates: list, heads: int, offsets: str, causal: bool) -> list[Pattern]:
    if not segments or len(segments) != len(rates):
        raise UserError(f"a branch is a segment and a rate, and there are {len(segments)} segments, {len(rates)} rates")
    if offsets not in ("turns", "groups"):
        raise UserError(f"offsets must be 'turns' or 'groups', not '{offsets}'")
    made: list[Pattern] = []
    for segment, rate in zip(segments, rates, strict=True):
        comb = find(Pattern, "comb")(segment, rate)  # refuses invalid segments and rates
        if rate > 1:
            starts = [h % rate if offsets == "turns" else h // math.ceil(heads / rate) for h in range(heads)]
            cycle_length = rate if offsets == "turns" and heads % rate == 0 else heads
            comb = find(Pattern, "comb")(segment, rate, tuple(starts[:cycle_length]))
        made.append(Pattern.parse("causal") & comb if causal else comb)
    return made


class WithKeyCounts(Position):
    """A position whose bias is increased by the log of the number of branches that reach each key."""

    def __init__(self, inner: Position, branches: list[Pattern], heads: int):
        super().__init__()
        self.inner, self.branches, self.heads = inner, branches, heads
        self.limit, self.needs_query = inner.limit, inner.needs_query

    def query(self, q: Tensor, at: Tensor) -> Tensor:
        return self.inner.query(q, at)

    def key(self, k: Tensor, at: Tensor) -> Tensor:
        return self.inner.key(k, at)

    def bias_query(self, q: Tensor) -> Tensor:
        return self.inner.bias_query(q)

    def bias(self, query_at: Tensor, key_at: Tensor, q: Tensor) -> Tensor:
        counts = [cycle(branch.allows(query_at, key_at), self.heads).to(q.dtype) for branch in self.branches]
        count = sum(counts[1:], start=counts[0]).clamp(min=1).log()
        own = self.inner.bias(query_at, key_at, q)
        return count if own is None else count + own

    def flops(self, queries: int, keys: int, pairs: float) -> int:
        return self.inner.flops(queries, keys, pairs)


class BranchAttend(Attend):
    """Computes long sequences branch by branch and joins the results; shorter ones as one attention over all
    branches."""

    def __init__(self, branches: list[Pattern], union: Pattern, learned: bool, kernel: str, dropout: float):
        super().__init__(kernel, dropout)
        self.branches, self.union, self.learned = branches, union, learned

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        score: Score,
        position: Position,
        plain: Tensor | None = None,
    ) -> Tensor:
        if not self._is_faster(q, mask, score):
            return super().forward(q, k, v, mask, score, position, plain)
        if torch.is_autocast_enabled(q.device.type):
            q, k, v = (t.to(torch.get_autocast_dtype(q.device.type)) for t in (q, k, v))
        assert isinstance(position, WithKeyCounts)
        drop, plain = self.dropout if self.training else 0.0, q if plain is None else plain
        parts = []
        for branch in self.branches:
            if isinstance(mask.pattern, Both) and mask.pattern.one is self.union:  # the batch adds a pattern of its own
                branch = branch & mask.pattern.two
            branch_mask = mask._replace(pattern=branch)
            parts.append(blocks.attend_partially(q, k, v, branch_mask, position.inner, plain, drop))
        return merge(parts, self.learned).y

    def _is_faster(self, q: Tensor, mask: AttentionMask, score: Score) -> bool:
        if self.weights.watched or not score.is_dot or not mask.from_start or self.kernel not in ("auto", "blocks"):
            return False
        min_length = blocks.MIN_LENGTH["cpu" if q.device.type == "cpu" else "cuda"]
        constant = not self.learned and torch.is_grad_enabled()
        return self.kernel == "blocks" or constant or q.shape[2] >= min_length
