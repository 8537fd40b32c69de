"""Attention patterns as an algebra, from which masks, pictures, cache eviction and block layouts are derived.

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
MAX_INT = 2**31 - 1  # of the numbers in a pattern, so that they fit positions of every integer type


class Pattern:
    """Which queries may attend to which keys. Frozen, so that results derived from it can be cached. Parts are frozen
    dataclasses; those with tensors use eq=False and are equal when they hold the same tensor objects.

    inner:  the patterns that it consists of.
    causal: no query attends to later positions, so a decoder may step.
    fixed:  it depends on positions alone, not on a batch's data.
    heads:  the number of heads after which it repeats; 1: all heads are alike.
    rows:   the number of sequences that its data is for; 1: any number.
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
        """Return a bool tensor of the shape to which the integer positions broadcast: (batch or 1, 1, n, 1) with
        (batch or 1, 1, 1, m) gives (batch or 1, heads, n, m). Elementwise: each pair is independent of the others."""

    def keeps(self, key_at: Tensor, now: Tensor) -> Tensor:
        """Return whether a query at `now` or later may still attend to this key; never True again once it was False.
        True when in doubt: where it is False, the key is dropped from the cache."""
        return torch.ones_like(key_at + now, dtype=torch.bool)

    def reaching(self, positions: int) -> Pattern:
        """Return the pattern with this reach in place of its own, where it has one."""
        return self

    def kin(self, at: Tensor) -> Tensor | None:
        """Return a group number for each position: positions of a group attend to similar keys, so a kernel computes
        them together. None: neighbors do."""
        return None

    def edges(self, length: int) -> Tensor:
        """Return (3, pairs): sequence, query and key of every allowed pair among the first `length` positions, in any
        head. This is the edge list of a graph, for graph attention; parts that hold such a list override it."""
        at = torch.arange(length, device="cpu")
        found = [torch.empty(3, 0, dtype=torch.long, device="cpu")]
        for queries in query_chunks(at):
            keys = reachable_keys(self, at, queries)
            row, query, key = allowed_pairs(self, queries, keys).any(1).nonzero(as_tuple=True)
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
        """Return the text that `parse` reads; a tensor is shown by its shape, which cannot be parsed."""
        given: list[str] = []
        omitted = False  # once an argument is left out, those after it need their names
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if self.variadic:
                given += [str(item) for item in value]
            elif isinstance(value, Tensor) or value != f.default:
                shown = f"<{' x '.join(map(str, value.shape))}>" if isinstance(value, Tensor) else repr(value)
                given.append(f"{f.name}={shown}" if omitted else shown)
            else:
                omitted = True
        name = _name(type(self))  # type: ignore[arg-type]
        return f"{name}({', '.join(given)})" if given else name

    def mask(self, length: int, queries: int | None = None) -> Tensor:
        """Return the bool mask (heads, queries, length) of the first `length` positions; for a pattern with batch data,
        of the first sequence."""
        at = torch.arange(length, device="cpu")
        return allowed_pairs(self, at[:queries], at)[0]

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Parse the text form."""
        from .text import parse

        return parse(text)


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
        """Filter the edge list of one pattern by the other, where one has such a list."""
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
    """The complement. Never causal, and keeps every key: these cannot be derived from the inner pattern."""

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
    """(..., own, n, m) -> (..., heads or 1, n, m): repeat the masks of a few heads over all heads."""
    own = allowed.shape[-3] if allowed.dim() > 2 else 1
    if own in (1, heads):
        return allowed
    return allowed.index_select(-3, torch.arange(heads, device=allowed.device) % own)


def check_int(name: str, value: Any, least: int, most: int = MAX_INT) -> None:
    """Refuse a constructor argument that is not a whole number from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise UserError(f"{name} must be at least {least}, not {value}")
    if value > most:
        raise UserError(f"{name} must be at most {most}")


def allowed_pairs(pattern: Pattern, queries: Tensor, keys: Tensor) -> Tensor:
    """Return the mask (rows, heads, queries, keys) for positions (queries,) and (keys,)."""
    allowed = pattern.allows(queries[None, None, :, None], keys[None, None, None, :])
    return allowed.expand(-1, -1, len(queries), len(keys))


def query_chunks(at: Tensor) -> tuple[Tensor, ...]:
    return at.split(256) if len(at) else ()


def reachable_keys(pattern: Pattern, at: Tensor, queries: Tensor) -> Tensor:
    """Return the positions among `at` that the ascending `queries` may attend to, and few others."""
    at = at[: int(queries[-1]) + 1] if pattern.causal else at
    return at[pattern.keeps(at, queries[0])]
