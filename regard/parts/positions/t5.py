"""A learned bias for how far apart query and key are: exact for near keys, in ever wider buckets for far ones.

    bias = table[bucket(j - i)]            one column of the table for each head

Raffel et al. 2020, "T5", arXiv:1910.10683, which shares one table between the layers of a stack: name it in the stack,
and "shared" in its attentions.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Position, UserError
from regard.ops.rotary import constant


class T5(Position):
    """buckets:    rows of the table; half of a direction's are for one distance each.
    max_distance:  from here on all keys are in the last bucket.
    bidirectional: half of the buckets are for keys ahead; False: all keys ahead are as the query's own place.
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
        self.ahead = side if bidirectional else None
        self.behind = _buckets(side, max_distance)
        self.table = nn.Parameter(torch.empty(buckets, heads).normal_(std=width**-0.5))

    def bucket(self, ahead: Tensor) -> Tensor:
        """The row of the table for keys so many places ahead of the query."""
        far = ahead.abs() if self.ahead else -ahead.clamp(max=0)
        row = constant(self.behind, ahead.device).long()[far.clamp(max=len(self.behind) - 1)]
        return row + self.ahead * (ahead > 0) if self.ahead else row

    def bias(self, query_at: Tensor, key_at: Tensor, q: Tensor) -> Tensor:
        rows = self.bucket(key_at - query_at)[:, 0]  # (batch or 1, n, m)
        return F.embedding(rows, self.table).permute(0, 3, 1, 2).to(q.dtype)


def _buckets(count: int, max_distance: int) -> tuple[int, ...]:
    """The bucket of each distance up to the last one. In the original's single precision, since its rounding decides
    where a power of two falls."""
    exact = count // 2
    far = torch.arange(exact, max_distance + 1, dtype=torch.float32, device="cpu")
    wide = exact + (torch.log(far / exact) / math.log(max_distance / exact) * (count - exact)).long()
    return (*range(exact), *wide.clamp(max=count - 1).tolist())
