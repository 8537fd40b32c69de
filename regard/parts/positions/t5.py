"""A learned bias for the distance between query and key: one per distance for near keys, and one per bucket of
distances for far keys.

    bias = table[bucket(j - i)]            one column of the table for each head

Raffel et al. 2020, "T5", arXiv:1910.10683, which shares one table between the layers of a stack: name it in the stack,
and "shared" in its attention layers.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Position, UserError
from regard.ops.rotary import constant


class T5(Position):
    """buckets:    rows of the table; half of those of a direction are for one distance each.
    max_distance:  from this distance on, all keys are in the last bucket.
    bidirectional: half of the buckets are for keys after the query; False: all of those share the bucket of distance 0.
    """

    relative = True
    examples = ({}, {"buckets": 7, "max_distance": 15, "bidirectional": False}, {"buckets": 8, "max_distance": 9})

    def __init__(self, width: int, heads: int, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True):
        super().__init__()
        side = buckets // 2 if bidirectional else buckets
        if side < 2 or (bidirectional and buckets % 2):
            raise UserError(
                f"buckets must be {'even and at least 4' if bidirectional else 'at least 2'}, not {buckets}"
            )
        if max_distance <= side // 2:
            raise UserError(
                f"max_distance must be above {side // 2}, which has a bucket of its own, not {max_distance}"
            )
        self.first_ahead = side if bidirectional else None
        self.bucket_of = _buckets(side, max_distance)
        self.table = nn.Parameter(torch.empty(buckets, heads).normal_(std=width**-0.5))

    def bucket(self, relative: Tensor) -> Tensor:
        """Return the row of the table for keys at `key position - query position`."""
        distance = relative.abs() if self.first_ahead else -relative.clamp(max=0)
        row = constant(self.bucket_of, relative.device).long()[distance.clamp(max=len(self.bucket_of) - 1)]
        return row + self.first_ahead * (relative > 0) if self.first_ahead else row

    def bias(self, query_at: Tensor, key_at: Tensor, q: Tensor) -> Tensor:
        rows = self.bucket(key_at - query_at)[:, 0]  # (batch or 1, n, m)
        return F.embedding(rows, self.table).permute(0, 3, 1, 2).to(q.dtype)


def _buckets(count: int, max_distance: int) -> tuple[int, ...]:
    """Return the bucket of each distance up to `max_distance`. It is computed in float32 like the original, since
    rounding decides where a power of two falls."""
    exact = count // 2
    distance = torch.arange(exact, max_distance + 1, dtype=torch.float32, device="cpu")
    coarse = exact + (torch.log(distance / exact) / math.log(max_distance / exact) * (count - exact)).long()
    return (*range(exact), *coarse.clamp(max=count - 1).tolist())
