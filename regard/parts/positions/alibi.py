"""Attention with linear biases: keys count less the further away they are, at a rate of its own in each head.

    bias = -slope |i - j|            slopes 2^(-8/heads), 2^(-16/heads), ... 2^-8

Press et al. 2022, "Train Short, Test Long", arXiv:2108.12409.
"""

import torch
from torch import Tensor

from regard.core import Position
from regard.ops.rotary import constant


class Alibi(Position):
    """Nothing is learned, and any length will do. Keys ahead, where the pattern allows any, count as those behind.

    last: slopes fall to 2^-last; the paper's and BLOOM's is 8, MPT's can be chosen.
    """

    relative = True
    examples = ({}, {"last": 4.0})

    def __init__(self, heads: int, last: float = 8.0):
        super().__init__()
        self.slopes = slopes(heads, last)

    def bias(self, query_at: Tensor, key_at: Tensor, q: Tensor) -> Tensor:
        exact = torch.promote_types(q.dtype, torch.float32)  # half floats cannot count far
        far = (query_at - key_at).abs().to(exact)  # (batch or 1, 1, n, m)
        return (far * -constant(self.slopes, q.device).to(exact)[:, None, None]).to(q.dtype)


def slopes(heads: int, last: float) -> tuple[float, ...]:
    """Geometric when heads are a power of two; else those of the power below, and then every other one of the power
    above."""
    below = 1 << (heads.bit_length() - 1)
    whole = [2 ** (-last * (i + 1) / below) for i in range(below)]
    between = [2 ** (-last * (i + 1) / (2 * below)) for i in range(0, 2 * below, 2)]
    return tuple(whole + between[: heads - below])
