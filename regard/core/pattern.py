"""Who may look at whom: an algebra of patterns, from which masks, pictures, cache eviction and block layouts follow.

    causal & (window(256) | stride(64) | first(4))

`allows` is the definition. In a recipe a pattern is that very string, read by a parser that knows names, calls,
numbers and & | ~ and nothing else.
"""

from __future__ import annotations

import ast
import heapq
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .errors import UserError
from .parts import find, fit


class Pattern:
    """Frozen, so that what is derived from it can be remembered. Parts are frozen dataclasses.

    causal: nobody looks ahead, so a decoder may step through it.
    fixed:  depends on positions alone, not on a batch's data.
    """

    folder: ClassVar[tuple[str, ...]] = ("patterns",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)

    @property
    def causal(self) -> bool:
        return False

    @property
    def fixed(self) -> bool:
        return True

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        """Bool, from integer positions that broadcast: (batch or 1, 1, n, 1) and (batch or 1, 1, 1, m).
        Dimension -3 is the head, for patterns that differ between heads."""
        raise NotImplementedError

    def keeps(self, key_at: Tensor, now: Tensor) -> Tensor:
        """May a query at `now` or later still look at this key? Never True again once it was False.
        True when in doubt: what it refuses is dropped from the cache."""
        return torch.ones_like(key_at + now, dtype=torch.bool)

    def __and__(self, other: Pattern) -> Pattern:
        return Both(self, other)

    def __or__(self, other: Pattern) -> Pattern:
        return Either(self, other)

    def __invert__(self) -> Pattern:
        return Not(self)

    def __str__(self) -> str:
        name = type(self).__name__
        snake = "".join(("_" + c.lower()) if c.isupper() and i else c.lower() for i, c in enumerate(name))
        given = ", ".join(str(v) for f in fields(self) if (v := getattr(self, f.name)) != f.default)  # type: ignore[arg-type]
        return f"{snake}({given})" if given else snake

    def mask(self, length: int, queries: int | None = None) -> Tensor:
        """(heads or 1, queries, length): the picture of the first `length` positions, as a bool tensor."""
        at = torch.arange(length)
        return self.allows(at[None, None, : queries or length, None], at[None, None, None, :])[0]

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """From the string form."""
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            raise UserError(
                f"pattern '{text}' cannot be read at column {error.offset}: write names, numbers, & | ~"
            ) from None
        except (ValueError, RecursionError, MemoryError):
            raise UserError("a pattern cannot be read: write names, numbers, & | ~") from None
        return _read(tree, text)


@dataclass(frozen=True)
class Both(Pattern):
    one: Pattern
    two: Pattern

    @property
    def causal(self) -> bool:
        return self.one.causal or self.two.causal

    @property
    def fixed(self) -> bool:
        return self.one.fixed and self.two.fixed

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        return self.one.allows(query_at, key_at) & self.two.allows(query_at, key_at)

    def keeps(self, key_at: Tensor, now: Tensor) -> Tensor:
        return self.one.keeps(key_at, now) & self.two.keeps(key_at, now)

    def __str__(self) -> str:
        return " & ".join(f"({p})" if isinstance(p, Either) else str(p) for p in (self.one, self.two))


@dataclass(frozen=True)
class Either(Pattern):
    one: Pattern
    two: Pattern

    @property
    def causal(self) -> bool:
        return self.one.causal and self.two.causal

    @property
    def fixed(self) -> bool:
        return self.one.fixed and self.two.fixed

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        return self.one.allows(query_at, key_at) | self.two.allows(query_at, key_at)

    def keeps(self, key_at: Tensor, now: Tensor) -> Tensor:
        return self.one.keeps(key_at, now) | self.two.keeps(key_at, now)

    def __str__(self) -> str:
        return f"{self.one} | {self.two}"


@dataclass(frozen=True)
class Not(Pattern):
    one: Pattern

    @property
    def fixed(self) -> bool:
        return self.one.fixed

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        return ~self.one.allows(query_at, key_at)

    def __str__(self) -> str:
        return f"~({self.one})" if isinstance(self.one, Both | Either) else f"~{self.one}"


def _read(node: ast.expr, text: str) -> Pattern:
    match node:
        case ast.BinOp(op=ast.BitAnd()):
            return _read(node.left, text) & _read(node.right, text)
        case ast.BinOp(op=ast.BitOr()):
            return _read(node.left, text) | _read(node.right, text)
        case ast.UnaryOp(op=ast.Invert()):
            return ~_read(node.operand, text)
        case ast.Name():
            return _make(node.id, [], {}, text)
        case ast.Call(func=ast.Name(id=name)):
            if any(word.arg is None for word in node.keywords) or any(isinstance(a, ast.Starred) for a in node.args):
                raise UserError(f"pattern '{text}': stars are not understood")
            given = [_value(argument, text) for argument in node.args]
            named = {str(word.arg): _value(word.value, text) for word in node.keywords}
            return _make(name, given, named, text)
    raise UserError(f"pattern '{text}': '{ast.unparse(node)}' is not a pattern; write names, calls, & | ~")


def _value(node: ast.expr, text: str) -> Any:
    """An argument: a number, a string, a tuple of those, or another pattern."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        return -_value(node.operand, text)
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_value(item, text) for item in node.elts)
    return _read(node, text)


def _make(name: str, given: list, named: dict[str, Any], text: str) -> Pattern:
    try:
        kind = find(Pattern, name)
        variadic = getattr(kind, "variadic", False)
        order = [f.name for f in fields(kind)]  # type: ignore[arg-type]
        if variadic:
            return kind(tuple(given))  # type: ignore[call-arg]
        if len(given) > len(order):
            raise UserError(f"{name} takes at most {len(order)} numbers ({', '.join(order)}), not {len(given)}")
        both = set(named) & set(order[: len(given)])
        if both:
            raise UserError(f"{name} is given {both.pop()} twice")
        return kind(**fit(kind, dict(zip(order, given, strict=False)) | named, {}))
    except UserError as error:
        raise UserError(f"in pattern '{text}': {error}") from None


def blind(pattern: Pattern, length: int, valid: Tensor | None = None) -> int | None:
    """The first query among `length` positions that has nothing to see (in some head), None when all have.
    Where a batch's data decides, only its `valid` (batch, length) queries count."""
    if not pattern.fixed:
        return _first_blind(pattern, length, valid)
    if not pattern.causal:  # a short sequence may lack what a longer one has
        return _blind(pattern, length)
    at = _blind(pattern, roof(length))
    return at if at is not None and at < length else None


def roof(length: int) -> int:
    """The next power of two, at least 256: what is derived for it serves every shorter causal sequence too."""
    return 1 << max(length - 1, 255).bit_length()


def _first_blind(pattern: Pattern, length: int, valid: Tensor | None = None) -> int | None:
    device = valid.device if valid is not None else None
    keys = torch.arange(length, device=device)[None, None, None, :]
    for begin in range(0, length, 256):
        queries = torch.arange(begin, min(begin + 256, length), device=device)[None, None, :, None]
        lost = ~pattern.allows(queries, keys).expand(-1, -1, -1, length).any(-1)  # (batch, heads, queries)
        if valid is not None:
            lost = lost & valid[:, None, begin : begin + 256]
        lost = lost.flatten(0, 1).any(0)
        if lost.any():
            return begin + int(lost.int().argmax())
    return None


_blind = lru_cache(maxsize=256)(_first_blind)


@lru_cache(maxsize=1024)
def pairs(pattern: Pattern, length: int, past: int = 0) -> float:
    """How many (query, key) pairs `length` queries after `past` others look at, a mean over the heads."""
    keys = torch.arange(past + length)[None, None, None, :]
    total = 0.0
    for begin in range(past, past + length, 256):
        queries = torch.arange(begin, min(begin + 256, past + length))[None, None, :, None]
        allowed = pattern.allows(queries, keys)[0].expand(-1, queries.shape[2], past + length)
        total += float(allowed.sum()) / allowed.shape[0]
    return total


@lru_cache(maxsize=256)
def expiry(pattern: Pattern, length: int) -> Tensor:
    """(length,): for each key the first time at which it is not kept any more; `length` when it outlives them all.
    By bisection, since `keeps` never comes back to True."""
    at = torch.arange(length)
    low, high = at + 1, torch.full((length,), length)
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
    return Slots(torch.tensor(table, dtype=torch.long), counts, reused)
