"""LSH attention: positions are sorted by hash bucket, the order is cut into chunks, and attention is within chunks.

    bucket(x) = argmax [x R; -x R]                          R a random rotation, one for each round
    out_i     = softmax over j in the union of all rounds' P_i^r of (q_i . k_j)  v_j          itself if P is empty

P_i^r are the positions of i's bucket in its chunk and the neighboring ones. A round knows only its own P, so each
divides the weight of j by N_ij, the number of rounds with j in P_i, and the rounds are summed:

    out_i = sum_r exp(z^r_i - z_i) out^r_i          z^r_i = log sum over j in P_i^r of exp(q_i . k_j - log N_ij)
    z_i   = log sum_r exp(z^r_i)

Kitaev et al. 2020, "Reformer: The Efficient Transformer", arXiv:2001.04451, section 2 and appendix A.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import masked_softmax
from .dispatch import NO_KERNEL, note
from .join import PartialAttention, merge, partial_attention

MAX_COMPARISONS = 1 << 22  # of a new position with an old one, in memory at a time


class LshRule(NamedTuple):
    """Which positions attend to which.

    size:    positions of a chunk of the sorted order.
    before:  number of chunks before its own that a query attends to; after: chunks after it.
    causal:  only earlier positions.
    near:    instead of whole chunks, the last so many positions of the query's bucket; 0: whole chunks.
    across:  also positions of other buckets in those chunks; the order of a round then continues in the next one's.
    repeats: a key found in several rounds counts several times.
    """

    size: int
    before: int = 1
    after: int = 0
    causal: bool = True
    near: int = 0
    across: bool = False
    repeats: bool = False

    @property
    def span(self) -> int:
        """The number of positions that a query is compared with."""
        return (self.before + 1 + self.after) * self.size


def bucket(x: Tensor, rotations: Tensor, buckets: tuple[int, ...]) -> Tensor:
    """x (batch, heads, time, dim), rotations (heads, dim, rounds, sum of buckets / 2) -> (batch, heads, rounds, time).
    Several bucket counts give independent hashes, combined into as many buckets as their product."""
    note("lsh", NO_KERNEL)
    turned = torch.einsum("bhnd,hdri->bhrni", x.detach(), rotations.to(x.dtype))
    found, stride = torch.zeros(turned.shape[:-1], dtype=torch.long, device=x.device), 1
    for some, count in zip(turned.split([count // 2 for count in buckets], -1), buckets, strict=True):
        found = found + stride * torch.cat((some, -some), -1).argmax(-1)
        stride *= count
    return found


class Order(NamedTuple):
    """The sorted order of every round, in chunks."""

    at: Tensor  # (batch, heads, rounds, chunks, size) the position at each rank, -1 for none
    place: Tensor  # (batch, heads, rounds, time) the rank of each position
    code: Tensor  # (batch, heads, rounds, time) numbers that are close for positions that may attend to each other
    most: int  # the largest difference of a query's and a key's code
    least: int  # and the smallest


def sort(buckets: Tensor, lengths: Tensor, rule: LshRule) -> Order:
    """Sort by bucket and then by position; positions that are not real come last."""
    time = buckets.shape[-1]
    real = torch.arange(time, device=buckets.device) < lengths[:, None, None, None]
    buckets = buckets.long()
    order = torch.where(real, buckets, torch.iinfo(torch.long).max).argsort(dim=-1, stable=True)
    place = order.argsort(-1)
    at = F.pad(torch.where(real, order, -1), (0, -time % rule.size), value=-1)
    code = place if rule.near else place // rule.size
    if not rule.across:
        code = code + buckets * (2 * at.shape[-1] + rule.near)  # what is in another bucket is far away
    most, least = (rule.near, 1) if rule.near else (rule.before, -rule.after)
    return Order(at.unflatten(-1, (-1, rule.size)), place, code, most, least)


def neighbor_keys(order: Order, number: int, lengths: Tensor, rule: LshRule) -> Tensor:
    """Return the key positions of each chunk of round `number`, (batch, heads, chunks, span), -1 for none."""
    batch, heads, rounds, chunks, size = order.at.shape
    steps = torch.arange(-rule.before, rule.after + 1, device=lengths.device)
    index = torch.arange(chunks, device=lengths.device)[:, None] + steps  # (chunks, steps)
    if rule.across:  # wraps around, over the chunks that are not empty
        own = (-(-lengths // size)).clamp(min=1)[:, None, None]
        flat = (number * own + index) % (rounds * own)
        index, inside = flat // own * chunks + flat % own, (index[:, rule.before, None] < own).expand_as(flat)
    else:
        inside = (index >= 0) & (index < chunks)
        index, inside = (number * chunks + index.clamp(0, chunks - 1))[None], inside[None]
    index = index.expand(batch, *index.shape[1:]).reshape(batch, 1, -1, 1).expand(-1, heads, -1, size)
    found = order.at.flatten(2, 3).gather(2, index).unflatten(2, (chunks, -1))
    return torch.where(inside[:, None, :, :, None], found, -1).flatten(-2)


class ComparedPairs(NamedTuple):
    """The queries and keys that are compared in one round."""

    query_at: Tensor  # (batch, heads, chunks, size) positions, -1 for none
    key_at: Tensor  # (batch, heads, chunks, span)
    seen: Tensor  # (batch, heads, chunks, size, span)
    rounds: Tensor | None  # the same shape: in how many rounds a pair is compared; None: not needed


def compared_pairs(order: Order, number: int, lengths: Tensor, rule: LshRule) -> ComparedPairs:
    """Return the pairs that are compared in round `number`."""
    query_at, key_at = order.at[:, :, number], neighbor_keys(order, number, lengths, rule)
    one, two = query_at[..., :, None], key_at[..., None, :]
    seen = (two < one if rule.causal else two != one) & (two >= 0) & (one >= 0)

    def meet(other: int) -> Tensor:
        code = order.code[:, :, other]
        apart = gather(code, query_at)[..., :, None] - gather(code, key_at)[..., None, :]
        return (apart >= order.least) & (apart <= order.most)

    if not rule.across:
        seen &= meet(number)
    if rule.repeats:
        return ComparedPairs(query_at, key_at, seen, None)
    often = torch.zeros_like(seen, dtype=torch.uint8)
    for other in range(order.at.shape[2]):
        often += meet(other)
    return ComparedPairs(
        query_at, key_at, seen, often.clamp(min=1)
    )  # with wrapping they meet in another round's chunks


def attend(
    q: Tensor, k: Tensor, v: Tensor, buckets: Tensor, lengths: Tensor, rule: LshRule, drop: float
) -> PartialAttention:
    """Attend in all rounds: q, k and v (batch, heads, time, dim), buckets (batch, heads, rounds, time), lengths
    (batch,)."""
    order, parts = sort(buckets, lengths, rule), []
    exact = torch.promote_types(q.dtype, torch.float32)
    for number in range(buckets.shape[2]):
        here = compared_pairs(order, number, lengths, rule)
        less = None if here.rounds is None else -here.rounds.to(exact).log()
        keys, values = gather(k, here.key_at), gather(v, here.key_at)
        found = partial_attention(gather(q, here.query_at), keys, values, ~here.seen, less, drop)
        place = order.place[:, :, number]
        parts.append(PartialAttention(*(gather(t.flatten(2, 3), place) for t in found)))
    return merge(parts)


def dense_weights(q: Tensor, k: Tensor, buckets: Tensor, lengths: Tensor, rule: LshRule) -> Tensor:
    """Return the weights of `attend` as a dense matrix (batch, heads, time, time); a query without keys attends to
    itself."""
    batch, heads, rounds, time = buckets.shape
    order = sort(buckets, lengths, rule)
    often = torch.zeros(batch, heads, time * time, dtype=torch.long, device=q.device)
    for number in range(rounds):
        here = compared_pairs(order, number, lengths, rule)
        where = here.query_at[..., :, None] * time + here.key_at[..., None, :]
        where = torch.where(here.seen, where, 0).flatten(2)
        often.scatter_add_(2, where, here.seen.flatten(2).long())
    often = often.unflatten(2, (time, time))
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
    if rule.repeats:
        scores = scores + often.clamp(min=1).to(scores.dtype).log()
    weights = masked_softmax(scores.masked_fill(often == 0, float("-inf")))
    return weights + torch.diag_embed((often.sum(-1) == 0).to(weights.dtype))


def gather(x: Tensor, at: Tensor) -> Tensor:
    """Return x (batch, heads, time) or (batch, heads, time, dim) at positions (batch, heads, ...); -1 gives position
    0."""
    flat = at.clamp(min=0).flatten(2)
    if x.dim() == 3:
        return x.gather(2, flat).view(at.shape)
    return x.gather(2, flat[..., None].expand(-1, -1, -1, x.shape[-1])).view(*at.shape, x.shape[-1])


def attend_step(
    q: Tensor, k: Tensor, v: Tensor, query_buckets: Tensor, key_buckets: Tensor, query_at: Tensor, near: int
) -> tuple[Tensor, Tensor]:
    """Return `attend` with a causal rule of `near` for a few queries (batch, heads, n, dim) at positions query_at
    (batch, n), over all keys (batch, heads, m, dim) at positions 0, 1, 2, ..., and which queries have no keys."""
    batch, heads, rounds, keys = key_buckets.shape
    count = max(MAX_COMPARISONS // max(batch * heads * rounds * keys, 1), 1)
    outputs, nothing = [], []
    places = torch.arange(keys, device=q.device)
    for begin in range(0, q.shape[2], count):
        now = slice(begin, begin + count)
        same = query_buckets[:, :, :, now, None] == key_buckets[..., None, :]  # (batch, heads, rounds, n, keys)
        same &= places < query_at[:, None, None, now, None]
        age = same.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)
        chosen = (same & (age <= near)).any(2)
        at = torch.where(chosen, places, -1).topk(min(rounds * near, keys), -1).values  # (batch, heads, n, chosen)
        scores = (q[:, :, now, None] @ gather(k, at).mT).squeeze(-2)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        weights = masked_softmax(scores.masked_fill(at < 0, float("-inf"))).to(v.dtype)
        outputs.append((weights[..., None, :] @ gather(v, at)).squeeze(-2))
        nothing.append(~chosen.any(-1))
    return torch.cat(outputs, 2), torch.cat(nothing, 2)
