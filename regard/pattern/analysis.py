"""What follows from a pattern: who sees nothing, how many pairs there are, when a key may be dropped from a cache, and
which slot of the cache each position gets."""

from __future__ import annotations

import heapq
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import UserError

from .algebra import Pattern, cycle, look, pieces, reach


def blind(pattern: Pattern, length: int, valid: Tensor | None = None) -> int | None:
    """The first query among `length` positions that has nothing to see (in some head), None when all have.
    Where there is a `valid` (batch, length), only real queries count, and only real keys can be seen."""
    if not pattern.fixed:
        return _first_blind(pattern, length, valid)
    alone = _first_unseen(pattern, roof(length))
    if alone is None or alone >= length:  # who sees itself is not blind
        return None
    if not pattern.causal:  # a short sequence may lack what a longer one has
        return _blind(pattern, length) if valid is None else _first_blind(pattern, length, valid)
    at = _blind(pattern, roof(length))  # the keys of a real query are real: padding stands on the right
    return at if at is not None and at < length else None


def roof(length: int) -> int:
    """The next power of two, at least 256: what is derived for it serves every shorter causal sequence too."""
    return 1 << max(length - 1, 255).bit_length()


def _first_blind(pattern: Pattern, length: int, valid: Tensor | None = None) -> int | None:
    if valid is not None and pattern.rows not in (1, valid.shape[0]):
        raise UserError(f"pattern '{pattern}' is for {pattern.rows} sequences, and the batch has {valid.shape[0]}")
    device = valid.device if valid is not None else "cpu"
    at = torch.arange(length, device=device)
    real = valid if valid is not None else torch.ones(1, length, dtype=torch.bool, device=device)
    alone = ~_see_themselves(pattern, at) & real[:, None]  # (rows, heads, length)
    for queries in pieces(at[alone.flatten(0, 1).any(0)]):
        keys = reach(pattern, at, queries)
        seen = look(pattern, queries, keys) & real[:, None, None, keys]
        lost = ~seen.any(-1) & real[:, None, queries]  # (rows, heads, queries)
        lost = lost.flatten(0, 1).any(0)
        if bool(lost.any()):
            return int(queries[lost][0])
    return None


def _see_themselves(pattern: Pattern, at: Tensor) -> Tensor:
    """(rows, heads, length): whether each position sees itself, without asking about any other pair."""
    return pattern.allows(at[None, None, :, None], at[None, None, :, None]).squeeze(-1)


_blind = lru_cache(maxsize=256)(_first_blind)


@lru_cache(maxsize=256)
def _first_unseen(pattern: Pattern, length: int) -> int | None:
    """The first position that does not see itself in some head."""
    alone = ~_see_themselves(pattern, torch.arange(length, device="cpu")).flatten(0, 1).all(0)
    return int(alone.nonzero()[0]) if bool(alone.any()) else None


def pairs(pattern: Pattern, length: int, past: int = 0, heads: int | None = None) -> float:
    """How many (query, key) pairs `length` queries after `past` others look at, a mean over the heads (of one round
    of them, unless their number is given) and over the batch where its data decides."""
    count = _pairs if pattern.fixed else _count_pairs
    return count(pattern, length, past, heads or pattern.heads)


def _count_pairs(pattern: Pattern, length: int, past: int, heads: int) -> float:
    at = torch.arange(past + length, device="cpu", dtype=torch.int32)
    total = 0.0
    for queries in pieces(at[past:]):
        allowed = cycle(look(pattern, queries, reach(pattern, at, queries)), heads).flatten(0, 1)
        total += int(allowed.count_nonzero()) / allowed.shape[0]
    return total


_pairs = lru_cache(maxsize=1024)(_count_pairs)


@lru_cache(maxsize=256)
def expiry(pattern: Pattern, length: int) -> Tensor:
    """(length,): for each key the first time at which it is not kept any more; `length` when it outlives them all.
    By bisection, since `keeps` never comes back to True."""
    at = torch.arange(length, device="cpu")
    low, high = at + 1, torch.full_like(at, length)
    while bool((low < high).any()):
        middle = (low + high) // 2
        kept = pattern.keeps(at, middle)
        low, high = torch.where(kept & (low < high), middle + 1, low), torch.where(kept, high, middle)
    return low


class Slots(NamedTuple):
    """Where a cache keeps each position."""

    table: Tensor  # (length,) the slot of each position
    counts: list[int]  # slots in use once each position is written
    reused: int  # the first position that takes over a slot; the length when none does


def slots(pattern: Pattern, length: int, chunk: int) -> Slots:
    """A slot is used again once no query of a step of up to `chunk` positions can want its key any more.

    What a position gets does not depend on what comes later, so one long table serves every shorter length.
    """
    return _slots(pattern, roof(length), chunk)


@lru_cache(maxsize=256)
def _slots(pattern: Pattern, length: int, chunk: int) -> Slots:
    ends = expiry(pattern, length).tolist()
    table: list[int] = []
    counts: list[int] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    count, reused = 0, length
    for position in range(length):
        while busy and busy[0][0] <= position - (chunk - 1):
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            slot, reused = heapq.heappop(free), min(reused, position)
        else:
            slot, count = count, count + 1
        if ends[position] < length:  # else it stays for good
            heapq.heappush(busy, (ends[position], slot))
        table.append(slot)
        counts.append(count)
    return Slots(torch.tensor(table, dtype=torch.long, device="cpu"), counts, reused)
