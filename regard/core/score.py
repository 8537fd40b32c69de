"""The contract of scores, which compare a query with a key."""

from typing import Any, ClassVar

from torch import Tensor, nn


class Score(nn.Module):
    """Most scores are a dot product of a transformed query and a transformed key; those override `query` and `key` and
    run on every kernel. The others override `forward` and run on the reference kernel.

    cached: channels of a key after `key`, as they are cached; None: those of a head.
    factor: the number that the query is multiplied by, where that is all the score does; None where it does more.
    birth:  the query projection is multiplied by it at initialization, instead of a scale in the score.
    """

    folder: ClassVar[tuple[str, ...]] = ("scores",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    cached: int | None = None
    factor: float | None = None
    birth: float = 1.0

    def query(self, q: Tensor) -> Tensor:
        """Transform q (batch, heads, n, dim)."""
        return q

    def key(self, k: Tensor) -> Tensor:
        """Transform k (batch, kv_heads, m, dim), once, before it is cached."""
        return k

    def forward(self, q: Tensor, k: Tensor, key_at: Tensor) -> Tensor:
        """Compare q and k (batch, heads, n or m, channels), the outputs of `query` and `key`, k repeated for the heads
        that share it; key_at (batch or 1, m) is -1 for keys that are not real -> (batch, heads, n, m)."""
        return q @ k.mT

    def flops(self, queries: int, keys: int, pairs: float) -> int:
        """Return the flops of matrix products besides the dot product over a head's channels, for all heads of one
        sequence: new queries, new keys (0 when all are cached), and (query, key) pairs per head."""
        return 0

    @property
    def is_dot(self) -> bool:
        return type(self).forward is Score.forward
