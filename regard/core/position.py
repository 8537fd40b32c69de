"""The contract of position encodings. A position overrides the one method where it acts."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .context import Context
from .fusion import RotaryTables


class Position(nn.Module):
    """Does nothing by default; a part overrides the methods it needs.

    limit:    the longest sequence that it can encode; None: any.
    relative: scores depend on differences of positions alone; the laws then shift all positions and compare.
    needs_query: its bias depends on the query, so the score must be a dot product.
    """

    folder: ClassVar[tuple[str, ...]] = ("positions",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    limit: int | None = None
    relative: bool = False
    needs_query: bool = False

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        """Act on token vectors: x (batch, time, width), at (batch or 1, time)."""
        return x

    def query(self, q: Tensor, at: Tensor) -> Tensor:
        """Act on queries, before the score: q (batch, heads, time, dim), at (batch or 1, time)."""
        return q

    def key(self, k: Tensor, at: Tensor) -> Tensor:
        """Act on keys, before they are cached: k (batch, kv_heads, time, dim), at (batch or 1, time)."""
        return k

    def value(self, v: Tensor, at: Tensor) -> Tensor:
        """Act on values, before they are cached: v (batch, kv_heads, time, dim), at (batch or 1, time)."""
        return v

    def bias_query(self, q: Tensor) -> Tensor:
        """Return the query that `bias` gets where it `needs_query`, from the projected q (batch, heads, time, dim)."""
        return q

    def bias(self, query_at: Tensor, key_at: Tensor, q: Tensor) -> Tensor | None:
        """Return what is added to scores, broadcastable to (batch, heads, n, m), in the dtype of q.

        query_at (batch or 1, 1, n, 1), key_at (batch or 1, 1, 1, m) with -1 for keys that are not real. Where it
        `needs_query`, q (batch, heads, n, dim) is `bias_query` after the score's `query`, so it is scaled already and
        the part must not scale again. Otherwise only the dtype of q matters."""
        return None

    def output_bias(self, weights: Tensor, query_at: Tensor, key_at: Tensor) -> Tensor | None:
        """Return what is added to the output: weights (batch, heads, n, m) -> (batch, heads, n, dim)."""
        return None

    def rotary_tables(self, context: Context, dtype: torch.dtype) -> RotaryTables | None:
        """Return the rotation in a step of one position, where rotating queries and keys is all it does; or None."""
        return None

    def flops(self, queries: int, keys: int, pairs: float) -> int:
        """Return the flops of the matrix products that it adds, for all heads of one sequence: new queries, all keys,
        and the (query, key) pairs per head."""
        return 0

    def acts(self, method: str) -> bool:
        """Return whether this part overrides `method`: embed, query, key, value, bias or output_bias."""
        return getattr(type(self), method) is not getattr(Position, method)

    def for_layer(self) -> "Position":
        """Return the position for one more layer that shares it: itself, unless some weights are per layer."""
        return self
