"""The contract of how a query and a key are compared."""

from typing import Any, ClassVar

from torch import Tensor, nn


class Score(nn.Module):
    """Most scores are a dot product after something is done to the query and the key alone; those override
    `query` and `key` and run on every kernel. The others override `forward` and run on the reference kernel."""

    folder: ClassVar[tuple[str, ...]] = ("scores",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)

    def query(self, q: Tensor) -> Tensor:
        """q (batch, heads, n, dim)"""
        return q

    def key(self, k: Tensor) -> Tensor:
        """k (batch, kv_heads, m, dim), once, before it is cached."""
        return k

    def forward(self, q: Tensor, k: Tensor, key_at: Tensor) -> Tensor:
        """q (batch, heads, n, dim), k (batch, heads, m, dim), key_at (batch or 1, m) -> (batch, heads, n, m)"""
        return q @ k.mT

    def flops(self, queries: int, keys: int, looks: float) -> int:
        """Of matrix products beyond the dot product itself, for all heads of one sequence: so many new queries (and,
        unless they are cached, as many new keys) among so many keys, `looks` pairs of them per head."""
        return 0

    @property
    def is_dot(self) -> bool:
        return type(self).forward is Score.forward
