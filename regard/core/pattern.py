"""Who may look at whom: an algebra of patterns, from which masks, pictures, cache eviction and block layouts follow.

    causal & (window(256) | stride(64) | first(4))

`allows` is the definition. In a recipe a pattern is that very string, which `pattern_text` reads.
"""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from regard.errors import UserError

from .parts import name_of

_name = lru_cache(name_of)  # of a class
LARGEST = 2**31 - 1  # of the numbers in a pattern, so that they fit positions of every integer type


class Pattern:
    """Frozen, so that what is derived from it can be remembered. Parts are frozen dataclasses; those that hold tensors
    say eq=False, and then two are equal when they hold the very same ones.

    inner:  the patterns that it is made of.
    causal: nobody looks ahead, so a decoder may step through it.
    fixed:  depends on positions alone, not on a batch's data.
    heads:  after how many heads it repeats; 1: all heads look alike.
    rows:   how many sequences its data is for; 1: any number.
    """

    folder: ClassVar[tuple[str, ...]] = ("patterns",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    variadic: ClassVar[bool] = False  # its only field is a tuple, written out as the arguments of its string form

    @property
    def inner(self) -> tuple[Pattern, ...]:
        return ()

    @property
    def causal(self) -> bool:
        return False

    @property
    def fixed(self) -> bool:
        return all(pattern.fixed for pattern in self.inner)

    @property
    def heads(self) -> int:
        return math.lcm(*(pattern.heads for pattern in self.inner))

    @property
    def rows(self) -> int:
        return max((pattern.rows for pattern in self.inner), default=1)

    @abstractmethod
    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        """Bool, of the shape to which the integer positions broadcast: (batch or 1, 1, n, 1) with (batch or 1, 1, 1, m)
        gives (batch or 1, heads, n, m). Place by place: nothing depends on the order or the number of the positions."""

    def keeps(self, key_at: Tensor, now: Tensor) -> Tensor:
        """May a query at `now` or later still look at this key? Never True again once it was False.
        True when in doubt: what it refuses is dropped from the cache."""
        return torch.ones_like(key_at + now, dtype=torch.bool)

    def reaching(self, positions: int) -> Pattern:
        """The same with so long a memory, where it has one of a given length."""
        return self

    def kin(self, at: Tensor) -> Tensor | None:
        """A number for each position: those that share it look at much the same keys, so that a kernel does well to
        compare them together. None: neighbours do."""
        return None

    def edges(self, length: int) -> Tensor:
        """(3, pairs): the sequence, query and key of every look among the first `length` positions, in any head.
        The form of a graph, for mixers that work look by look; parts that hold a list give it."""
        at = torch.arange(length, device="cpu")
        found = [torch.empty(3, 0, dtype=torch.long, device="cpu")]
        for queries in _pieces(at):
            keys = _reach(self, at, queries)
            row, query, key = _look(self, queries, keys).any(1).nonzero(as_tuple=True)
            found.append(torch.stack((row, queries[query], keys[key])))
        return torch.cat(found, 1)

    def __and__(self, other: Pattern) -> Pattern:
        return Both(self, other)

    def __or__(self, other: Pattern) -> Pattern:
        return Either(self, other)

    def __invert__(self) -> Pattern:
        return Not(self)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return False
        ours, theirs = ([getattr(p, f.name) for f in fields(p)] for p in (self, other))  # type: ignore[arg-type]
        return all(
            a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else a == b
            for a, b in zip(ours, theirs, strict=True)
        )

    def __hash__(self) -> int:
        values = [getattr(self, f.name) for f in fields(self)]  # type: ignore[arg-type]
        return hash((type(self), *(id(value) if isinstance(value, Tensor) else value for value in values)))

    def __str__(self) -> str:
        """What `parse` reads; in place of a tensor its shape, which no recipe can say."""
        given: list[str] = []
        silent = False  # once an argument is left out, those after it need their names
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if self.variadic:
                given += [str(item) for item in value]
            elif isinstance(value, Tensor) or value != f.default:
                shown = f"<{' x '.join(map(str, value.shape))}>" if isinstance(value, Tensor) else repr(value)
                given.append(f"{f.name}={shown}" if silent else shown)
            else:
                silent = True
        name = _name(type(self))  # type: ignore[arg-type]
        return f"{name}({', '.join(given)})" if given else name

    def mask(self, length: int, queries: int | None = None) -> Tensor:
        """(heads, queries, length): who may look at whom among the first `length` positions, as a bool tensor.
        Of the first sequence, where a batch's data decides."""
        at = torch.arange(length, device="cpu")
        return _look(self, at[:queries], at)[0]

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """From the string form."""
        from .pattern_text import read

        return read(text)


@dataclass(frozen=True)
class Both(Pattern):
    one: Pattern
    two: Pattern

    @property
    def inner(self) -> tuple[Pattern, ...]:
        return self.one, self.two

    @property
    def causal(self) -> bool:
        return self.one.causal or self.two.causal

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        return cycle(self.one.allows(query_at, key_at), self.heads) & cycle(
            self.two.allows(query_at, key_at), self.heads
        )

    def keeps(self, key_at: Tensor, now: Tensor) -> Tensor:
        return self.one.keeps(key_at, now) & self.two.keeps(key_at, now)

    def reaching(self, positions: int) -> Pattern:
        return Both(self.one.reaching(positions), self.two.reaching(positions))

    def edges(self, length: int) -> Tensor:
        """Where one holds a list, the other is asked about the pairs of that list alone."""
        for lists, other in ((self.one, self.two), (self.two, self.one)):
            if type(lists).edges is not Pattern.edges and other.rows == 1:
                row, query, key = lists.edges(length)
                allowed = other.allows(query[None, None, :, None], key[None, None, :, None])
                return torch.stack((row, query, key))[:, allowed.any(1).flatten()]
        return super().edges(length)

    def __str__(self) -> str:
        left = f"({self.one})" if isinstance(self.one, Either) else str(self.one)
        right = f"({self.two})" if isinstance(self.two, Both | Either) else str(self.two)
        return f"{left} & {right}"


@dataclass(frozen=True)
class Either(Pattern):
    one: Pattern
    two: Pattern

    @property
    def inner(self) -> tuple[Pattern, ...]:
        return self.one, self.two

    @property
    def causal(self) -> bool:
        return self.one.causal and self.two.causal

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        return cycle(self.one.allows(query_at, key_at), self.heads) | cycle(
            self.two.allows(query_at, key_at), self.heads
        )

    def keeps(self, key_at: Tensor, now: Tensor) -> Tensor:
        return self.one.keeps(key_at, now) | self.two.keeps(key_at, now)

    def reaching(self, positions: int) -> Pattern:
        return Either(self.one.reaching(positions), self.two.reaching(positions))

    def __str__(self) -> str:
        right = f"({self.two})" if isinstance(self.two, Either) else str(self.two)
        return f"{self.one} | {right}"


@dataclass(frozen=True)
class Not(Pattern):
    """Never causal, and keeps everything: what its pattern knows about those says nothing about the rest."""

    one: Pattern

    @property
    def inner(self) -> tuple[Pattern, ...]:
        return (self.one,)

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        return ~self.one.allows(query_at, key_at)

    def __invert__(self) -> Pattern:
        return self.one

    def __str__(self) -> str:
        return f"~({self.one})" if isinstance(self.one, Both | Either) else f"~{self.one}"


def cycle(allowed: Tensor, heads: int) -> Tensor:
    """(..., own, n, m) -> (..., heads or 1, n, m): what is said for a few heads goes round all of them."""
    own = allowed.shape[-3] if allowed.dim() > 2 else 1
    if own in (1, heads):
        return allowed
    return allowed.index_select(-3, torch.arange(heads, device=allowed.device) % own)


def whole(name: str, value: Any, least: int, most: int = LARGEST) -> None:
    """For the constructors of patterns: refuse what is no whole number from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise UserError(f"{name} must be at least {least}, not {value}")
    if value > most:
        raise UserError(f"{name} must be at most {most}")


def _look(pattern: Pattern, queries: Tensor, keys: Tensor) -> Tensor:
    """(rows, heads, queries, keys), from their positions (queries,) and (keys,)."""
    allowed = pattern.allows(queries[None, None, :, None], keys[None, None, None, :])
    return allowed.expand(-1, -1, len(queries), len(keys))


def _pieces(at: Tensor) -> tuple[Tensor, ...]:
    return at.split(256) if len(at) else ()


def _reach(pattern: Pattern, at: Tensor, queries: Tensor) -> Tensor:
    """The positions out of `at` that ascending `queries` may look at, and few others."""
    at = at[: int(queries[-1]) + 1] if pattern.causal else at
    return at[pattern.keeps(at, queries[0])]


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
    for queries in _pieces(at[alone.flatten(0, 1).any(0)]):
        keys = _reach(pattern, at, queries)
        seen = _look(pattern, queries, keys) & real[:, None, None, keys]
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
    for queries in _pieces(at[past:]):
        allowed = cycle(_look(pattern, queries, _reach(pattern, at, queries)), heads).flatten(0, 1)
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
