"""Attention with linear biases (ALiBi): a score falls with the distance of the key, at a different rate in each head.

    bias = -slope |i - j|            slopes 2^(-8/heads), 2^(-16/heads), ... 2^-8

Press et al. 2022, "Train Short, Test Long", arXiv:2108.12409.
"""

import torch
from torch import Tensor

from regard.core import Position
from regard.ops.rotary import constant


class Alibi(Position):
    """Nothing is learned, and there is no maximum length. Keys after the query are penalized like keys before it.

    last: the slopes fall to 2^-last; 8 in the paper and in BLOOM, configurable in MPT.
    """

    relative = True
    examples = ({}, {"last": 4.0})

    def __init__(self, heads: int, last: float = 8.0):
        super().__init__()
        self.slopes = slopes(heads, last)

    def bias(self, query_at: Tensor, key_at: Tensor, q: Tensor) -> Tensor:
        exact = torch.promote_types(q.dtype, torch.float32)  # half precision cannot represent large distances
        distance = (query_at - key_at).abs().to(exact)  # (batch or 1, 1, n, m)
        return (distance * -constant(self.slopes, q.device).to(exact)[:, None, None]).to(q.dtype)


def slopes(heads: int, last: float) -> tuple[float, ...]:
    """Return the slope of each head: a geometric series if `heads` is a power of two; otherwise the series of the next
    lower power, followed by every other slope of the next higher power."""
    below = 1 << (heads.bit_length() - 1)
    series = [2 ** (-last * (i + 1) / below) for i in range(below)]
    between = [2 ** (-last * (i + 1) / (2 * below)) for i in range(0, 2 * below, 2)]
    return tuple(series + between[: heads - below])
