"""Who may look at whom: an algebra of patterns, from which masks, pictures, cache eviction and block layouts follow.

    causal & (window(256) | stride(64) | first(4))

`allows` is the definition. In a recipe a pattern is that very string, which text.py reads.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.errors import UserError
from regard.schema import name_of

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
        return max([1, *(pattern.rows for pattern in self.inner)])

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
        for queries in pieces(at):
            keys = reach(self, at, queries)
            row, query, key = look(self, queries, keys).any(1).nonzero(as_tuple=True)
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
        return look(self, at[:queries], at)[0]

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """From the string form."""
        from .text import read

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


def look(pattern: Pattern, queries: Tensor, keys: Tensor) -> Tensor:
    """(rows, heads, queries, keys), from their positions (queries,) and (keys,)."""
    allowed = pattern.allows(queries[None, None, :, None], keys[None, None, None, :])
    return allowed.expand(-1, -1, len(queries), len(keys))


def pieces(at: Tensor) -> tuple[Tensor, ...]:
    return at.split(256) if len(at) else ()


def reach(pattern: Pattern, at: Tensor, queries: Tensor) -> Tensor:
    """The positions out of `at` that ascending `queries` may look at, and few others."""
    at = at[: int(queries[-1]) + 1] if pattern.causal else at
    return at[pattern.keeps(at, queries[0])]
