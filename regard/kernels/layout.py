"""Which keys each block of queries needs, derived from a pattern's `allows` alone.

For `causal & window(256)` a block of 128 queries needs 383 keys, however long the sequence. What is derived for a
power of two is remembered and serves every shorter sequence; no more than one block's pairs exist at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from regard.core import Pattern
from regard.core.pattern import Both, Either, roof

REMEMBERED = 1 << 24  # pairs of a plan whose masks are kept; the others are made again when they are wanted


class Look(NamedTuple):
    """A block of queries and the keys that some of them may see."""

    queries: slice
    keys: slice | Tensor  # ascending
    hidden: Tensor | None  # (rows or 1, heads or 1, queries, keys), True where a query may not look; None: not known

    @property
    def shape(self) -> tuple[int, int]:
        """Queries, keys."""
        keys = self.keys.stop - self.keys.start if isinstance(self.keys, slice) else len(self.keys)
        return self.queries.stop - self.queries.start, keys

    def places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(1, 1, queries, 1) and (1, 1, 1, keys), as patterns and positions want them."""
        query_at = torch.arange(self.queries.start, self.queries.stop, device=device)
        key_at = self.keys
        if isinstance(key_at, slice):
            key_at = torch.arange(key_at.start, key_at.stop, device=device)
        return query_at[None, None, :, None], key_at[None, None, None, :]

    def cut(self, length: int) -> Look:
        """The same in a sequence that ends at `length`."""
        queries, keys = slice(self.queries.start, min(self.queries.stop, length)), self.keys
        if isinstance(keys, slice):
            keys = slice(min(keys.start, length), min(keys.stop, length))
        elif keys[-1] >= length:
            keys = shorten(keys[keys < length])
        look = Look(queries, keys, None)
        n, m = look.shape
        return look if self.hidden is None else look._replace(hidden=self.hidden[..., :n, :m])

    def prune(self) -> Look:
        """Without the keys that turn out to be hidden from all."""
        assert self.hidden is not None
        seen = ~self.hidden.flatten(0, 2).all(0)
        if bool(seen.all()):
            return self
        keys = self.places(seen.device)[1].flatten()[seen]
        return Look(self.queries, shorten(keys), self.hidden[..., seen])


def shorten(keys: Tensor) -> slice | Tensor:
    """Ascending positions, as a slice where nothing is missing between them: a slice needs no copies."""
    if not len(keys):
        return slice(0, 0)
    first, last = int(keys[0]), int(keys[-1])
    return slice(first, last + 1) if last - first + 1 == len(keys) else keys


def outline(pattern: Pattern) -> Pattern | None:
    """A pattern that depends on positions alone and allows no less; None when there is none but everything."""
    if pattern.fixed:
        return pattern
    if isinstance(pattern, Both | Either):
        one, two = outline(pattern.one), outline(pattern.two)
        if one is not None and two is not None:
            return type(pattern)(one, two)
        if isinstance(pattern, Both):
            return two if one is None else one
    return None


def plan(pattern: Pattern | None, length: int, block: int, device: torch.device) -> list[list[Look]]:
    """For each head of the pattern, what every block of queries looks at. None: at everything."""
    return [
        [look.cut(length) for look in looks if look.queries.start < length]
        for looks in _plan(pattern, roof(length), block, device)
    ]


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # it will be met again in training
def _plan(pattern: Pattern | None, length: int, block: int, device: torch.device) -> list[list[Look]]:
    plans: list[list[Look]] = [[] for _ in range(1 if pattern is None else pattern.heads)]
    at = torch.arange(length, device=device)
    left = REMEMBERED
    for begin in range(0, length, block):
        queries = slice(begin, min(begin + block, length))
        for looks, (keys, hidden) in zip(plans, _looks(pattern, at[queries], at), strict=True):
            if looks and looks[-1].hidden is not None and torch.equal(looks[-1].hidden, hidden):
                hidden = looks[-1].hidden  # in a window, every block is like its neighbour
            else:
                left -= hidden.numel()
            looks.append(Look(queries, keys, hidden if left >= 0 else None))
    return plans


def _looks(pattern: Pattern | None, queries: Tensor, at: Tensor) -> Iterator[tuple[slice | Tensor, Tensor]]:
    """For each head of the pattern, the keys that some of these queries see, and from whom each is hidden."""
    if pattern is None:
        yield shorten(at), torch.zeros(1, 1, len(queries), len(at), dtype=torch.bool, device=at.device)
        return
    if pattern.causal:
        at = at[: int(queries[-1]) + 1]
    at = at[pattern.keeps(at, queries[0])]
    allowed = pattern.allows(queries[None, None, :, None], at[None, None, None, :])
    allowed = allowed.expand(-1, pattern.heads, len(queries), len(at))
    for head in allowed[0]:
        seen = head.any(0)
        yield shorten(at[seen]), ~head[None, None, :, seen]


@lru_cache(maxsize=1024)
def share(pattern: Pattern, length: int, block: int, device: torch.device) -> float:
    """Of all pairs of a query and a key, those that are computed."""
    plans = plan(pattern, length, block, device)
    looked = [look.shape for looks in plans for look in looks]
    return sum(n * m for n, m in looked) / (len(plans) * length**2)
