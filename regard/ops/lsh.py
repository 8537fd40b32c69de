"""Attention to what a hash puts into the same bucket: sort by bucket, cut the order into chunks, compare within them.

    bucket(x) = argmax [x R; -x R]                          R a random rotation, one for each round
    out_i     = softmax over j in the union of all rounds' P_i^r of (q_i . k_j)  v_j          itself if there is none

P_i^r are the positions in i's bucket that its chunk, or those beside it, hold. A round knows only its own P, so each
divides what it finds for j by N_ij, the number of rounds that find it, and the rounds are added up:

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
from .join import Part, few, join

AT_ONCE = 1 << 22  # comparisons of one new position with one old one that live together


class Rule(NamedTuple):
    """Who may look at whom.

    size:    positions of a chunk of the sorted order.
    before:  chunks before its own that a query sees; after: those behind it.
    causal:  only what came earlier.
    near:    instead of whole chunks, the last so many of the query's bucket; 0: whole chunks.
    across:  also what other buckets have in those chunks; the order of a round then goes on in the next one's.
    repeats: what is found in several rounds counts several times.
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
        """Positions with which one is compared."""
        return (self.before + 1 + self.after) * self.size


def bucket(x: Tensor, rotations: Tensor, buckets: tuple[int, ...]) -> Tensor:
    """x (batch, heads, time, dim), rotations (heads, dim, rounds, sum of buckets / 2) -> (batch, heads, rounds, time).
    Several numbers of buckets are hashed each for itself, and there are as many in all as their product."""
    note("lsh", NO_KERNEL)
    turned = torch.einsum("bhnd,hdri->bhrni", x.detach(), rotations.to(x.dtype))
    found, stride = torch.zeros(turned.shape[:-1], dtype=torch.long, device=x.device), 1
    for some, count in zip(turned.split([count // 2 for count in buckets], -1), buckets, strict=True):
        found = found + stride * torch.cat((some, -some), -1).argmax(-1)
        stride *= count
    return found


class Order(NamedTuple):
    """The sorted order of every round, in chunks."""

    at: Tensor  # (batch, heads, rounds, chunks, size) the position in each place, -1 for none
    place: Tensor  # (batch, heads, rounds, time) the place of each position
    code: Tensor  # (batch, heads, rounds, time) for `Rule`: close numbers for those that see each other
    most: int  # how far a key's code may be below its query's
    least: int  # and how far at least; negative: above


def sort(buckets: Tensor, lengths: Tensor, rule: Rule) -> Order:
    """By bucket and then by position; what is not real comes last."""
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


def beside(order: Order, number: int, lengths: Tensor, rule: Rule) -> Tensor:
    """(batch, heads, chunks, span): the positions of the keys of each chunk of round `number`, -1 for none."""
    batch, heads, rounds, chunks, size = order.at.shape
    steps = torch.arange(-rule.before, rule.after + 1, device=lengths.device)
    index = torch.arange(chunks, device=lengths.device)[:, None] + steps  # (chunks, steps)
    if rule.across:  # around the ends, over the chunks that hold anything
        own = (-(-lengths // size)).clamp(min=1)[:, None, None]
        flat = (number * own + index) % (rounds * own)
        index, inside = flat // own * chunks + flat % own, (index[:, rule.before, None] < own).expand_as(flat)
    else:
        inside = (index >= 0) & (index < chunks)
        index, inside = (number * chunks + index.clamp(0, chunks - 1))[None], inside[None]
    index = index.expand(batch, *index.shape[1:]).reshape(batch, 1, -1, 1).expand(-1, heads, -1, size)
    found = order.at.flatten(2, 3).gather(2, index).unflatten(2, (chunks, -1))
    return torch.where(inside[:, None, :, :, None], found, -1).flatten(-2)


class Looks(NamedTuple):
    """Who is compared with whom in one round, and who sees whom."""

    query_at: Tensor  # (batch, heads, chunks, size) positions, -1 for none
    key_at: Tensor  # (batch, heads, chunks, span)
    seen: Tensor  # (batch, heads, chunks, size, span)
    often: Tensor | None  # the same shape: the rounds in which they meet, None where that does not matter


def looks(order: Order, number: int, lengths: Tensor, rule: Rule) -> Looks:
    """Of round `number`."""
    query_at, key_at = order.at[:, :, number], beside(order, number, lengths, rule)
    one, two = query_at[..., :, None], key_at[..., None, :]
    seen = (two < one if rule.causal else two != one) & (two >= 0) & (one >= 0)

    def meet(other: int) -> Tensor:
        code = order.code[:, :, other]
        apart = pick(code, query_at)[..., :, None] - pick(code, key_at)[..., None, :]
        return (apart >= order.least) & (apart <= order.most)

    if not rule.across:
        seen &= meet(number)
    if rule.repeats:
        return Looks(query_at, key_at, seen, None)
    often = torch.zeros_like(seen, dtype=torch.uint8)
    for other in range(order.at.shape[2]):
        often += meet(other)
    return Looks(query_at, key_at, seen, often.clamp(min=1))  # around the ends they meet in another's chunks


def attend(q: Tensor, k: Tensor, v: Tensor, buckets: Tensor, lengths: Tensor, rule: Rule, drop: float) -> Part:
    """q, k and v (batch, heads, time, dim), buckets (batch, heads, rounds, time), lengths (batch,)."""
    order, parts = sort(buckets, lengths, rule), []
    exact = torch.promote_types(q.dtype, torch.float32)
    for number in range(buckets.shape[2]):
        here = looks(order, number, lengths, rule)
        less = None if here.often is None else -here.often.to(exact).log()
        keys, values = pick(k, here.key_at), pick(v, here.key_at)
        found = few(pick(q, here.query_at), keys, values, ~here.seen, less, drop)
        place = order.place[:, :, number]
        parts.append(Part(*(pick(t.flatten(2, 3), place) for t in found)))
    return join(parts)


def weigh(q: Tensor, k: Tensor, buckets: Tensor, lengths: Tensor, rule: Rule) -> Tensor:
    """The weights that `attend` gives to values: (batch, heads, time, time). What is alone takes itself."""
    batch, heads, rounds, time = buckets.shape
    order = sort(buckets, lengths, rule)
    often = torch.zeros(batch, heads, time * time, dtype=torch.long, device=q.device)
    for number in range(rounds):
        here = looks(order, number, lengths, rule)
        where = here.query_at[..., :, None] * time + here.key_at[..., None, :]
        where = torch.where(here.seen, where, 0).flatten(2)
        often.scatter_add_(2, where, here.seen.flatten(2).long())
    often = often.unflatten(2, (time, time))
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
    if rule.repeats:
        scores = scores + often.clamp(min=1).to(scores.dtype).log()
    weights = masked_softmax(scores.masked_fill(often == 0, float("-inf")))
    return weights + torch.diag_embed((often.sum(-1) == 0).to(weights.dtype))


def pick(x: Tensor, at: Tensor) -> Tensor:
    """x (batch, heads, time) or (batch, heads, time, dim) at places (batch, heads, ...); -1 gives the first one."""
    flat = at.clamp(min=0).flatten(2)
    if x.dim() == 3:
        return x.gather(2, flat).view(at.shape)
    return x.gather(2, flat[..., None].expand(-1, -1, -1, x.shape[-1])).view(*at.shape, x.shape[-1])


def recall(
    q: Tensor, k: Tensor, v: Tensor, query_buckets: Tensor, key_buckets: Tensor, query_at: Tensor, near: int
) -> tuple[Tensor, Tensor]:
    """As `attend` with a causal rule of `near`, for a few queries (batch, heads, n, dim) at places query_at (batch, n)
    among all keys (batch, heads, m, dim), which stand at 0, 1, 2, ...; only those that are seen are compared."""
    batch, heads, rounds, keys = key_buckets.shape
    count = max(AT_ONCE // max(batch * heads * rounds * keys, 1), 1)
    outputs, nothing = [], []
    places = torch.arange(keys, device=q.device)
    for begin in range(0, q.shape[2], count):
        now = slice(begin, begin + count)
        same = query_buckets[:, :, :, now, None] == key_buckets[..., None, :]  # (batch, heads, rounds, n, keys)
        same &= places < query_at[:, None, None, now, None]
        age = same.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1)
        chosen = (same & (age <= near)).any(2)
        at = torch.where(chosen, places, -1).topk(min(rounds * near, keys), -1).values  # (batch, heads, n, chosen)
        scores = (q[:, :, now, None] @ pick(k, at).mT).squeeze(-2)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        weights = masked_softmax(scores.masked_fill(at < 0, float("-inf"))).to(v.dtype)
        outputs.append((weights[..., None, :] @ pick(v, at)).squeeze(-2))
        nothing.append(~chosen.any(-1))
    return torch.cat(outputs, 2), torch.cat(nothing, 2)
