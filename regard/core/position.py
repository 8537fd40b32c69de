"""The contract of what tells a model where things are. A position overrides the one place where it acts."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .context import Context
from .fusion import RotaryTables


class Position(nn.Module):
    """Everything here does nothing; a part overrides what it needs.

    limit:    the longest sequence that it knows, None when there is none.
    relative: only differences of positions matter to the scores; the laws then shift everything and compare.
    asks:     its bias depends on the query, so it needs a score that is a dot product.
    """

    folder: ClassVar[tuple[str, ...]] = ("positions",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    limit: int | None = None
    relative: bool = False
    asks: bool = False

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        """On token vectors: x (batch, time, width), at (batch or 1, time)."""
        return x

    def query(self, q: Tensor, at: Tensor) -> Tensor:
        """On queries, before the score: q (batch, heads, time, dim), at (batch or 1, time)."""
        return q

    def key(self, k: Tensor, at: Tensor) -> Tensor:
        """On keys, before they are cached: k (batch, kv_heads, time, dim), at (batch or 1, time)."""
        return k

    def value(self, v: Tensor, at: Tensor) -> Tensor:
        """On values, before they are cached: v (batch, kv_heads, time, dim), at (batch or 1, time)."""
        return v

    def probe(self, q: Tensor) -> Tensor:
        """The query that `bias` compares with places, where it `asks`: q (batch, heads, time, dim), the plain one."""
        return q

    def bias(self, query_at: Tensor, key_at: Tensor, q: Tensor) -> Tensor | None:
        """On scores: query_at (batch or 1, 1, n, 1), key_at (batch or 1, 1, 1, m) with -1 for keys that are not real.
        Returns what broadcasts to (batch, heads, n, m), in the dtype of q.

        Where it `asks`, q (batch, heads, n, dim) is what the score's own `query` made of `probe`: scaled already, as
        the query of the dot product is, so that a part multiplies by its vectors and never by a scale of its own.
        Else q says nothing but the dtype."""
        return None

    def read(self, weights: Tensor, query_at: Tensor, key_at: Tensor) -> Tensor | None:
        """On what is read: weights (batch, heads, n, m) -> an addition to the output (batch, heads, n, dim)."""
        return None

    def rotary_tables(self, context: Context, dtype: torch.dtype) -> RotaryTables | None:
        """Where all that it does is to turn queries and keys: how, in a step of one position. None: it does more."""
        return None

    def flops(self, queries: int, keys: int, looks: float) -> int:
        """Of matrix products that it adds, for all heads of one sequence: so many new queries among so many keys,
        `looks` pairs of them per head."""
        return 0

    def acts(self, place: str) -> bool:
        """Whether this part does anything at `place`: embed, query, key, value, bias or read."""
        return getattr(type(self), place) is not getattr(Position, place)

    def for_layer(self) -> "Position":
        """What one more layer of a stack takes of the part that they share: the part itself, unless something in it is
        each layer's own."""
        return self
