"""The contract of how a query and a key are compared."""

from typing import Any, ClassVar

from torch import Tensor, nn


class Score(nn.Module):
    """Most scores are a dot product after something is done to the query and the key alone; those override
    `query` and `key` and run on every kernel. The others override `forward` and run on the reference kernel.

    cached: channels of a key as `key` leaves it, and so in a cache; None: those of a head.
    factor: where a query times this number is all that it does; None where it does more.
    birth:  the map that makes queries is multiplied by it at birth, where the score has no scale that does the same.
    """

    folder: ClassVar[tuple[str, ...]] = ("scores",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    cached: int | None = None
    factor: float | None = None
    birth: float = 1.0

    def query(self, q: Tensor) -> Tensor:
        """q (batch, heads, n, dim)"""
        return q

    def key(self, k: Tensor) -> Tensor:
        """k (batch, kv_heads, m, dim), once, before it is cached."""
        return k

    def forward(self, q: Tensor, k: Tensor, key_at: Tensor) -> Tensor:
        """q and k (batch, heads, n or m, channels) as `query` and `key` left them, k repeated for the heads that share
        it, key_at (batch or 1, m) with -1 for keys that are not real -> (batch, heads, n, m)"""
        return q @ k.mT

    def flops(self, queries: int, keys: int, looks: float) -> int:
        """Of matrix products beyond the dot product over a head's channels, for all heads of one sequence: so many new
        queries, so many new keys (none when all are cached), `looks` pairs per head."""
        return 0

    @property
    def is_dot(self) -> bool:
        return type(self).forward is Score.forward
