"""Block-sparse attention: a block of queries is compared only with the keys that its pattern allows.

Time and memory are linear in the length for a window. Weights exist for one block at a time, and the backward pass
computes them again. With S = q k^T + bias and P = softmax(S):

    dv = P^T dy        dS = P * (dy v^T - dy . y)        dq = dS k        dk = dS^T q

Where the parts of a pattern are computed separately and merged, log sum exp(S) is returned too, and its gradient is
added to dS / P. As in Dao et al. 2022, "FlashAttention", arXiv:2205.14135. Works with gradients on every device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.core import Position, UserError
from regard.ops.join import PartialAttention, merge

from .attention_mask import AttentionMask
from .layout import Cover, QueryBlock, outline, plan, share

BLOCK = 128  # queries
MAX_SCORES = 1 << 19  # in memory at a time, so that they stay in the CPU's cache
MIN_LENGTH = {"cpu": 512, "cuda": 16384}  # what is shorter is left to the dense kernel
MAX_SHARE = {"cpu": 0.4, "cuda": 0.1}  # of all pairs; what has more is left to the dense kernel
SLOW_DENSE = 1.75  # times the share, where the dense kernel has to write all weights down


def supports(mask: AttentionMask) -> bool:
    """Return whether queries and keys are the same positions, from 0 on."""
    return mask.from_start


def is_faster(length: int, where: torch.device, mask: AttentionMask, position: Position, drop: float) -> bool:
    """Return whether this kernel is faster than the dense one for so many queries, judged by the pattern alone."""
    if not supports(mask):
        return False
    device = "cpu" if where.type == "cpu" else "cuda"
    slow = device == "cpu" and (drop > 0 or position.acts("bias"))
    pattern = outline(mask.pattern)
    if pattern is None or length < MIN_LENGTH[device] or (mask.causal_only and not slow):
        return False
    return share(pattern, length, BLOCK, where) < MAX_SHARE[device] * (SLOW_DENSE if slow else 1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    position: Position,
    plain: Tensor,
    drop: float,
    block: int = BLOCK,
) -> Tensor:
    return _interleave_heads([merge(parts).y for parts in _heads(q, k, v, mask, position, plain, drop, block)], q)


def attend_partially(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    position: Position,
    plain: Tensor,
    drop: float,
    block: int = BLOCK,
) -> PartialAttention:
    """Return attention over the keys that `mask` allows, to be merged with attention over other keys."""
    heads = [merge(parts) for parts in _heads(q, k, v, mask, position, plain, drop, block, alone=False)]
    return PartialAttention(
        _interleave_heads([y for y, _ in heads], q), _interleave_heads([total for _, total in heads], q)
    )


def _heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    position: Position,
    plain: Tensor,
    drop: float,
    block: int,
    alone: bool = True,
) -> Iterator[list[PartialAttention]]:
    """Yield, for each head of the pattern, the partial attentions to merge; log-sum-exps only where they are needed."""
    heads, seed = q.shape[1], int(torch.randint(1 << 62, ())) if drop else 0
    plans = plan(outline(mask.pattern), q.shape[2], block, q.device)[:heads]
    own = len(plans)  # heads that differ: head h follows the pattern's head h % own
    if own > 1 and k.shape[1] != heads:
        k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
    learned = tuple(position.parameters()) if position.acts("bias") else ()
    for first, covers in enumerate(plans):
        ours = slice(first, None, own)
        chosen = (q, k, v) if own == 1 else (q[:, ours], k[:, ours], v[:, ours])
        parts = []
        for among, query_blocks in covers or [Cover(None, [])]:
            there = mask if among is None else mask._replace(pattern=mask.pattern & among)
            call = SparseCall(there, query_blocks, position, heads, ours, drop, seed, not alone or len(covers) > 1)
            seed += 1
            parts.append(
                PartialAttention(*Sparse.apply(call, *chosen, plain if position.needs_query else None, *learned))
            )
        yield parts


def _interleave_heads(heads: list[Tensor], q: Tensor) -> Tensor:
    """Return (batch, heads, ...) from the outputs for each head of the pattern, which repeats over the heads."""
    own = len(heads)
    if own == 1:
        return heads[0]
    places = [head for first in range(own) for head in range(first, q.shape[1], own)]
    return torch.cat(heads, 1)[:, torch.tensor(places, device=q.device).argsort()]


class SparseCall(NamedTuple):
    """The arguments of one call besides its tensors."""

    mask: AttentionMask
    query_blocks: list[QueryBlock]
    position: Position
    heads: int  # of all calls together
    ours: slice  # those of this call
    drop: float
    seed: int
    joined: bool  # log-sum-exps are needed

    def pieces(self, q: Tensor) -> Iterator[tuple[tuple[Any, ...], QueryBlock]]:
        """Yield an index into q and the block for it, always in the same order."""
        for query_block in self.query_blocks:
            hidden = self.hidden(query_block)
            fixed = self.mask.pattern.fixed
            scores = q.shape[1] * max(hidden[0, 0].numel(), 1)
            some = max(MAX_SCORES // scores, 1) if fixed or len(hidden) == 1 else 1
            for row in range(0, len(q), some):
                rows = slice(row, min(row + some, len(q)))
                piece = query_block._replace(hidden=hidden[rows] if len(hidden) > 1 else hidden)
                piece = piece if fixed else piece.prune()
                if piece.shape[1]:
                    yield (rows, slice(None), query_block.queries), piece

    def hidden(self, query_block: QueryBlock) -> Tensor:
        """Return the mask (rows or 1, heads or 1, queries, keys), True where hidden by pattern, batch data or
        padding."""
        hidden = query_block.hidden
        if hidden is None or not self.mask.pattern.fixed:
            allowed = self.mask.at(*query_block.places(self.mask.key_at.device), self.heads)
            hidden = ~(allowed if allowed.shape[1] == 1 else allowed[:, self.ours])
            hidden = hidden.expand(-1, -1, *query_block.shape)
        if self.mask.holes:
            hidden = hidden | (self.mask.key_at[:, query_block.keys] < 0)[:, None, None, :]
        return hidden

    def bias(self, asked: Tensor, query_block: QueryBlock) -> Tensor | None:
        """Return the bias (rows, heads, queries, keys) for queries (rows, heads, queries, dim)."""
        bias = self.position.bias(*query_block.places(asked.device), asked)
        return None if bias is None else bias.expand(len(asked), self.heads, *query_block.shape)[:, self.ours]

    def score(self, q: Tensor, k: Tensor, bias: Tensor | None, query_block: QueryBlock) -> Tensor:
        """Return the scores (rows, heads, queries, keys), -inf where hidden."""
        scores = ungroup_heads(group_heads(q, k) @ k.mT, q).to(torch.promote_types(q.dtype, torch.float32))
        if bias is not None:
            scores += bias
        assert query_block.hidden is not None
        return scores.masked_fill_(query_block.hidden, float("-inf"))

    def weigh(self, scores: Tensor, query_block: QueryBlock) -> Tensor:
        """Return the softmax of the scores, zeros for queries without keys."""
        assert query_block.hidden is not None
        weights = torch.softmax(scores, -1)
        lost = query_block.hidden.all(-1, keepdim=True)
        return weights.masked_fill_(lost, 0.0) if bool(lost.any()) else weights

    def kept(self, weights: Tensor, chance: torch.Generator) -> Tensor | None:
        """Return the dropout factors of the weights; None without dropout."""
        if not self.drop:
            return None
        return torch.empty_like(weights).bernoulli_(1 - self.drop, generator=chance).div_(1 - self.drop)


class Sparse(torch.autograd.Function):
    """Attention over the blocks of a call; the weights of a block are freed after it."""

    @staticmethod
    def forward(
        ctx: Any, call: SparseCall, q: Tensor, k: Tensor, v: Tensor, plain: Tensor | None, *learned: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        ctx.call, ctx.learned = call, learned
        y = q.new_zeros(*q.shape[:3], v.shape[3])
        exact = torch.promote_types(q.dtype, torch.float32)
        total = torch.full(q.shape[:3], float("-inf"), dtype=exact, device=q.device) if call.joined else None
        chance = torch.Generator(q.device).manual_seed(call.seed)
        with torch.autocast(q.device.type, enabled=False):
            for here, query_block in call.pieces(q):
                keys, values = gather_keys(k, here, query_block), gather_keys(v, here, query_block)
                bias = call.bias((q if plain is None else plain)[here], query_block)
                scores = call.score(q[here], keys, bias, query_block)
                if total is not None:
                    total[here] = scores.logsumexp(-1)
                weights = call.weigh(scores, query_block)
                kept = call.kept(weights, chance)
                if kept is not None:
                    weights *= kept
                y[here] = ungroup_heads(group_heads(weights.to(v.dtype), v) @ values, q[here])
        ctx.save_for_backward(q, k, v, y, plain)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, d_total: Tensor | None) -> tuple[Tensor | None, ...]:
        call: SparseCall = ctx.call
        q, k, v, y, plain = ctx.saved_tensors
        exact = torch.promote_types(q.dtype, torch.float32)  # for sums over many blocks
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k, dtype=exact), torch.zeros_like(v, dtype=exact)
        told = (dy.to(exact) * y).sum(-1, keepdim=True)  # (batch, heads, n, 1)
        if d_total is not None:
            told -= d_total[..., None]
        bias = Bias(call, q, plain, ctx.learned)
        chance = torch.Generator(q.device).manual_seed(call.seed)
        for here, query_block in call.pieces(q):
            q_here, dy_here = q[here], dy[here]
            keys, values = gather_keys(k, here, query_block), gather_keys(v, here, query_block)
            weights = call.weigh(call.score(q_here, keys, bias.at(here, query_block), query_block), query_block)
            kept = call.kept(weights, chance)

            read = weights if kept is None else weights * kept
            add_key_gradient(dv, here, query_block, group_heads(read.to(v.dtype), v).mT @ group_heads(dy_here, v))
            d_weights = ungroup_heads(group_heads(dy_here, v) @ values.mT, q_here).to(weights.dtype)
            if kept is not None:
                d_weights *= kept
            d_scores = d_weights.sub_(told[here]).mul_(weights)
            bias.back(d_scores, here)
            d_scores = group_heads(d_scores.to(q.dtype), k)
            dq[here] = ungroup_heads(d_scores @ keys, q_here)
            add_key_gradient(dk, here, query_block, d_scores.mT @ group_heads(q_here, k))
        return None, dq, dk.to(k.dtype), dv.to(v.dtype), bias.d_plain, *bias.d_learned


class Bias:
    """The position's bias in the backward pass: computed again for each block, and its gradients summed."""

    def __init__(self, call: SparseCall, q: Tensor, plain: Tensor | None, learned: tuple[Tensor, ...]):
        if any(ours is not theirs for ours, theirs in zip(learned, call.position.parameters(), strict=False)):
            raise UserError("the position's weights were replaced since the forward pass: use kernel 'sdpa' for that")
        self.call, self.q, self.plain = call, q, plain
        self.wanted = [t for t in learned if t.requires_grad]
        self.d_plain = None if plain is None else torch.zeros_like(plain)
        self.d_learned = [torch.zeros_like(t) if t.requires_grad else None for t in learned]
        self.made: Tensor | None = None

    def at(self, here: tuple[Any, ...], query_block: QueryBlock) -> Tensor | None:
        with torch.enable_grad():
            self.asked = (self.q if self.plain is None else self.plain)[here].detach().requires_grad_()
            self.made = self.call.bias(self.asked, query_block)
        return None if self.made is None else self.made.detach()

    def back(self, d_scores: Tensor, here: tuple[Any, ...]) -> None:
        if self.made is None or not self.made.requires_grad:
            return
        d_scores = d_scores.to(self.made.dtype)
        asked, *learned = torch.autograd.grad(self.made, (self.asked, *self.wanted), d_scores, allow_unused=True)
        if self.d_plain is not None and asked is not None:
            self.d_plain[here] += asked
        for total, more in zip([t for t in self.d_learned if t is not None], learned, strict=True):
            if more is not None:
                total += more


def gather_keys(k: Tensor, here: tuple[Any, ...], query_block: QueryBlock) -> Tensor:
    """Return the keys or values (rows, kv_heads, keys, dim) of a block."""
    k = k[here[0]]
    return k[:, :, query_block.keys] if isinstance(query_block.keys, slice) else k.index_select(2, query_block.keys)


def add_key_gradient(dk: Tensor, here: tuple[Any, ...], query_block: QueryBlock, more: Tensor) -> None:
    """Add the gradient of a block's keys or values."""
    dk = dk[here[0]]
    if isinstance(query_block.keys, slice):
        dk[:, :, query_block.keys] += more
    else:
        dk.index_add_(2, query_block.keys, more.to(dk.dtype))


def group_heads(q: Tensor, k: Tensor) -> Tensor:
    """(rows, heads, n, any) -> (rows, kv_heads, group n, any): group the query heads that share a key head."""
    return q if q.shape[1] == k.shape[1] else q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])


def ungroup_heads(y: Tensor, q: Tensor) -> Tensor:
    """Undo `group_heads`: return (rows, heads, n, any), as in q."""
    return y.reshape(*q.shape[:3], y.shape[3])
