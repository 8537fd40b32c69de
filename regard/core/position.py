"""The contract of what tells a model where things are. A position overrides the one place where it acts."""

from typing import Any, ClassVar

from torch import Tensor, nn


class Position(nn.Module):
    """Everything here does nothing; a part overrides what it needs.

    limit:    the longest sequence that it knows, None when there is none.
    relative: only differences of positions matter to the scores; the laws then shift everything and compare.
    """

    folder: ClassVar[tuple[str, ...]] = ("positions",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    limit: int | None = None
    relative: bool = False

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        """On token vectors: x (batch, time, width), at (batch or 1, time)."""
        return x

    def query(self, q: Tensor, at: Tensor) -> Tensor:
        """On queries, before the score: q (batch, heads, time, dim), at (batch or 1, time)."""
        return q

    def key(self, k: Tensor, at: Tensor) -> Tensor:
        """On keys, before they are cached: k (batch, kv_heads, time, dim), at (batch or 1, time)."""
        return k

    def bias(self, query_at: Tensor, key_at: Tensor, q: Tensor) -> Tensor | None:
        """On scores: query_at (batch or 1, 1, n, 1), key_at (batch or 1, 1, 1, m), q (batch, heads, n, dim) as it
        was before `query` and unscaled. Returns what broadcasts to (batch, heads, n, m)."""
        return None

    def read(self, weights: Tensor, query_at: Tensor, key_at: Tensor) -> Tensor | None:
        """On what is read: weights (batch, heads, n, m) -> an addition to the output (batch, heads, n, dim)."""
        return None

    def flops(self, length: int, looks: float) -> int:
        """Of matrix products that it adds, for all heads of one sequence: `length` queries, `looks` pairs per head."""
        return 0

    def acts(self, place: str) -> bool:
        """Whether this part does anything at `place`: embed, query, key, bias or read."""
        return getattr(type(self), place) is not getattr(Position, place)
