"""The keys that each block of queries needs, derived from a pattern's `allows` alone.

For `causal & window(256)` a block of 128 queries needs 383 keys, however long the sequence. Where a pattern defines
`kin`, as `stride(128)` groups every 128th position, blocks of kin are compared with their kin and blocks of neighbors
with the rest, if that is less work: each pair once. A plan is cached for the next power of two and serves every shorter
sequence; no more than one block's pairs exist at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from regard.core import Pattern
from regard.pattern.algebra import Both, Either
from regard.pattern.analysis import round_up_length

MAX_CACHED_PAIRS = 1 << 24  # pairs of a plan whose masks are kept; the others are made again when they are wanted
MERGE_COST = 0.2  # of the work of a cover, what it takes to join it to others


class QueryBlock(NamedTuple):
    """A block of queries and the keys that some of them may attend to."""

    queries: slice | Tensor  # ascending
    keys: slice | Tensor  # ascending
    hidden: Tensor | None  # (rows or 1, heads or 1, queries, keys), True where masked; None: not cached

    @property
    def shape(self) -> tuple[int, int]:
        """Queries, keys."""
        return _count(self.queries), _count(self.keys)

    def places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return positions (1, 1, queries, 1) and (1, 1, 1, keys), for patterns and positions."""
        return _numbers(self.queries, device)[None, None, :, None], _numbers(self.keys, device)[None, None, None, :]

    def cut(self, length: int) -> QueryBlock:
        """The same in a sequence that ends at `length`."""
        query_block = QueryBlock(_cut(self.queries, length), _cut(self.keys, length), None)
        n, m = query_block.shape
        return query_block if self.hidden is None else query_block._replace(hidden=self.hidden[..., :n, :m])

    def prune(self) -> QueryBlock:
        """Return the block without the keys that are hidden from all queries."""
        assert self.hidden is not None
        seen = ~self.hidden.flatten(0, 2).all(0)
        if bool(seen.all()):
            return self
        keys = _numbers(self.keys, seen.device)[seen]
        return QueryBlock(self.queries, shorten(keys), self.hidden[..., seen])


def _count(at: slice | Tensor) -> int:
    return at.stop - at.start if isinstance(at, slice) else len(at)


def _numbers(at: slice | Tensor, device: torch.device) -> Tensor:
    return torch.arange(at.start, at.stop, device=device) if isinstance(at, slice) else at


def _cut(at: slice | Tensor, length: int) -> slice | Tensor:
    if isinstance(at, slice):
        return slice(min(at.start, length), min(at.stop, length))
    return shorten(at[at < length]) if at[-1] >= length else at


def shorten(at: Tensor) -> slice | Tensor:
    """Ascending positions, as a slice where nothing is missing between them: a slice needs no copies."""
    if not len(at):
        return slice(0, 0)
    first, last = int(at[0]), int(at[-1])
    return slice(first, last + 1) if last - first + 1 == len(at) else at


@dataclass(frozen=True)
class Kin(Pattern):
    """Allows the pairs of positions that a pattern puts into the same group."""

    of: Pattern

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        return self.of.kin(query_at) == self.of.kin(key_at)


class Cover(NamedTuple):
    """Blocks in which every query occurs at most once."""

    among: Pattern | None  # the pairs that these blocks compute; None: all
    query_blocks: list[QueryBlock]

    @property
    def pairs(self) -> int:
        return sum(n * m for n, m in (query_block.shape for query_block in self.query_blocks))


def outline(pattern: Pattern) -> Pattern | None:
    """Return a fixed pattern that allows at least as much; None where only 'everything' does."""
    if pattern.fixed:
        return pattern
    if isinstance(pattern, Both | Either):
        one, two = outline(pattern.one), outline(pattern.two)
        if one is not None and two is not None:
            return type(pattern)(one, two)
        if isinstance(pattern, Both):
            return two if one is None else one
    return None


def plan(pattern: Pattern | None, length: int, block: int, device: torch.device) -> list[list[Cover]]:
    """Return, for each head of the pattern, covers that share no pair. A pattern of None allows everything."""
    plans = _plan(pattern, round_up_length(length), block, device)
    return [[_shorter(cover, length) for cover in covers] for covers in plans]


def _shorter(cover: Cover, length: int) -> Cover:
    query_blocks = [query_block.cut(length) for query_block in cover.query_blocks]
    return cover._replace(query_blocks=[query_block for query_block in query_blocks if query_block.shape[0]])


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # it will be met again in training
def _plan(pattern: Pattern | None, length: int, block: int, device: torch.device) -> list[list[Cover]]:
    """Choose the least work for each head: blocks of neighbors, or blocks of kin plus blocks of neighbors for the
    rest."""
    at = torch.arange(length, device=device)
    kinds = [Kin(kind) for kind in _patterns_with_kin(pattern)]
    alone, *rests = _neighbor_blocks(pattern, kinds, at, block)
    ways = [[alone], *([_kin_blocks(pattern, kin, at, block), rest] for kin, rest in zip(kinds, rests, strict=True))]
    plans = []
    for head in range(len(ways[0][0])):
        choices = [[covers[head] for covers in config if covers[head].pairs] for config in ways]
        plans.append(
            min(choices, key=lambda covers: sum(cover.pairs for cover in covers) * (1 + MERGE_COST * len(covers)))
        )
    return plans


def _patterns_with_kin(pattern: Pattern | None) -> list[Pattern]:
    """Return the patterns inside it that define `kin`, each once."""
    if pattern is None:
        return []
    inner = [kind for part in pattern.inner for kind in _patterns_with_kin(part)]
    return list(dict.fromkeys(([pattern] if type(pattern).kin is not Pattern.kin else []) + inner))


class CoverBuilder:
    """Builds covers, one for each head; masks are kept up to MAX_CACHED_PAIRS."""

    def __init__(self, pattern: Pattern | None, among: Pattern | None):
        self.covers = [Cover(among, []) for _ in range(1 if pattern is None else pattern.heads)]
        self.left = MAX_CACHED_PAIRS

    def add(self, queries: Tensor, keys: Tensor, allowed: Tensor) -> None:
        """allowed (heads, queries, keys)"""
        for (_, query_blocks), head in zip(self.covers, allowed, strict=True):
            seen = head.any(0)
            hidden = ~head[None, None, :, seen]
            if query_blocks and query_blocks[-1].hidden is not None and torch.equal(query_blocks[-1].hidden, hidden):
                hidden = query_blocks[-1].hidden  # in a window, every block is like its neighbour
            else:
                self.left -= hidden.numel()
            query_blocks.append(QueryBlock(shorten(queries), shorten(keys[seen]), hidden if self.left >= 0 else None))


def _neighbor_blocks(pattern: Pattern | None, kinds: list[Kin], at: Tensor, block: int) -> list[list[Cover]]:
    """Return blocks of neighbors with all their keys, and for each kind of kin with the keys that are not kin."""
    builders = [CoverBuilder(pattern, among) for among in (None, *(~kin for kin in kinds))]
    for queries in at.split(block):
        keys, allowed = _visible_keys(pattern, queries, at)
        builders[0].add(queries, keys, allowed)
        for kin, draft in zip(kinds, builders[1:], strict=True):
            draft.add(queries, keys, allowed & ~kin.allows(queries[:, None], keys))
    return [draft.covers for draft in builders]


def _kin_blocks(pattern: Pattern, kin: Kin, at: Tensor, block: int) -> list[Cover]:
    """Return blocks of kin with the keys that are kin."""
    draft, number = CoverBuilder(pattern, kin), kin.of.kin(at)
    for queries in number.argsort(stable=True).split(block):
        queries = queries.sort().values
        keys, allowed = _visible_keys(pattern & kin, queries, at[torch.isin(number, number[queries])])
        draft.add(queries, keys, allowed)
    return draft.covers


def _visible_keys(pattern: Pattern | None, queries: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys among `at` that these queries may attend to, and few others, and the mask (heads, queries,
    keys)."""
    if pattern is None:
        return at, torch.ones(1, len(queries), len(at), dtype=torch.bool, device=at.device)
    if pattern.causal:
        at = at[at <= queries[-1]]
    at = at[pattern.keeps(at, queries[0])]
    allowed = pattern.allows(queries[None, None, :, None], at[None, None, None, :])
    return at, allowed.expand(-1, pattern.heads, len(queries), len(at))[0]


@lru_cache(maxsize=1024)
def share(pattern: Pattern, length: int, block: int, device: torch.device) -> float:
    """Return the fraction of all (query, key) pairs that are computed."""
    plans = plan(pattern, length, block, device)
    return sum(cover.pairs for covers in plans for cover in covers) / (len(plans) * length**2)
