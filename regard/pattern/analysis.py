"""Analysis of patterns: queries without keys, numbers of pairs, when a key may be dropped from a cache, and the cache
slot of each position."""

from __future__ import annotations

import heapq
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import UserError

from .algebra import Pattern, allowed_pairs, cycle, query_chunks, reachable_keys


def first_blind_query(pattern: Pattern, length: int, valid: Tensor | None = None) -> int | None:
    """Return the first query among `length` positions that has no keys in some head; None: there is none.
    With `valid` (batch, length), only real queries and real keys count."""
    if not pattern.fixed:
        return _find_blind(pattern, length, valid)
    alone = _first_not_seeing_itself(pattern, round_up_length(length))
    if alone is None or alone >= length:  # the others attend to themselves
        return None
    if not pattern.causal:  # keys of a longer sequence may be missing in a shorter one
        return _find_blind_cached(pattern, length) if valid is None else _find_blind(pattern, length, valid)
    at = _find_blind_cached(
        pattern, round_up_length(length)
    )  # the keys of a real query are real, since padding is on the right
    return at if at is not None and at < length else None


def round_up_length(length: int) -> int:
    """Return the next power of two, at least 256, so that a cached result serves all shorter causal sequences."""
    return 1 << max(length - 1, 255).bit_length()


def _find_blind(pattern: Pattern, length: int, valid: Tensor | None = None) -> int | None:
    if valid is not None and pattern.rows not in (1, valid.shape[0]):
        raise UserError(f"pattern '{pattern}' is for {pattern.rows} sequences, and the batch has {valid.shape[0]}")
    device = valid.device if valid is not None else "cpu"
    at = torch.arange(length, device=device)
    real = valid if valid is not None else torch.ones(1, length, dtype=torch.bool, device=device)
    alone = ~_see_themselves(pattern, at) & real[:, None]  # (rows, heads, length)
    for queries in query_chunks(at[alone.flatten(0, 1).any(0)]):
        keys = reachable_keys(pattern, at, queries)
        seen = allowed_pairs(pattern, queries, keys) & real[:, None, None, keys]
        lost = ~seen.any(-1) & real[:, None, queries]  # (rows, heads, queries)
        lost = lost.flatten(0, 1).any(0)
        if bool(lost.any()):
            return int(queries[lost][0])
    return None


def _see_themselves(pattern: Pattern, at: Tensor) -> Tensor:
    """Return (rows, heads, length): whether each position may attend to itself."""
    return pattern.allows(at[None, None, :, None], at[None, None, :, None]).squeeze(-1)


_find_blind_cached = lru_cache(maxsize=256)(_find_blind)


@lru_cache(maxsize=256)
def _first_not_seeing_itself(pattern: Pattern, length: int) -> int | None:
    """Return the first position that may not attend to itself in some head."""
    alone = ~_see_themselves(pattern, torch.arange(length, device="cpu")).flatten(0, 1).all(0)
    return int(alone.nonzero()[0]) if bool(alone.any()) else None


def pairs(pattern: Pattern, length: int, past: int = 0, heads: int | None = None) -> float:
    """Return the number of allowed (query, key) pairs of `length` queries after `past` others: the mean over heads
    (over one period of them, unless `heads` is given), and over the batch for a pattern with batch data."""
    count = _pairs if pattern.fixed else _count_pairs
    return count(pattern, length, past, heads or pattern.heads)


def _count_pairs(pattern: Pattern, length: int, past: int, heads: int) -> float:
    at = torch.arange(past + length, device="cpu", dtype=torch.int32)
    total = 0.0
    for queries in query_chunks(at[past:]):
        allowed = cycle(allowed_pairs(pattern, queries, reachable_keys(pattern, at, queries)), heads).flatten(0, 1)
        total += int(allowed.count_nonzero()) / allowed.shape[0]
    return total


_pairs = lru_cache(maxsize=1024)(_count_pairs)


@lru_cache(maxsize=256)
def expiry(pattern: Pattern, length: int) -> Tensor:
    """Return (length,): for each key the first time at which it is no longer kept, or `length`. Found by bisection,
    since `keeps` never becomes True again."""
    at = torch.arange(length, device="cpu")
    low, high = at + 1, torch.full_like(at, length)
    while bool((low < high).any()):
        middle = (low + high) // 2
        kept = pattern.keeps(at, middle)
        low, high = torch.where(kept & (low < high), middle + 1, low), torch.where(kept, high, middle)
    return low


class Slots(NamedTuple):
    """The cache slots of positions."""

    table: Tensor  # (length,) the slot of each position
    counts: list[int]  # slots in use once each position is written
    reused: int  # the first position that reuses a slot; the length when none does


def slots(pattern: Pattern, length: int, chunk: int) -> Slots:
    """Assign slots: one is reused once no query of a step of up to `chunk` positions can need its key.

    A position's slot does not depend on later positions, so one long table serves every shorter length.
    """
    return _slots(pattern, round_up_length(length), chunk)


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
        if ends[position] < length:  # otherwise it is never freed
            heapq.heappush(busy, (ends[position], slot))
        table.append(slot)
        counts.append(count)
    return Slots(torch.tensor(table, dtype=torch.long, device="cpu"), counts, reused)
