"""One vector per text, so that texts of like meaning lie near each other: the mean of its positions, of length one.

    y = pool(x)          with normalize:  y / |y|, so that a dot product is a cosine

Reimers & Gurevych 2019, "Sentence-BERT", arXiv:1908.10084.
"""

import torch.nn.functional as F
from torch import Tensor

from regard.bases.pooling import check_pool, pool
from regard.core import Context, Head, UserError, part


class Embed(Head):
    """pool: one vector of all real positions: first, last, mean or max.
    normalize: the vector is brought to length one.
    over:    the head whose vectors are pooled: "none": the last ones; "summary": the same, with BERT's layer kept.
    """

    examples = ({}, {"pool": "first", "normalize": True}, {"pool": "max", "over": "summary"})
    pools = True

    def __init__(self, width: int, pool: str = "mean", normalize: bool = False, over: Head | str | dict = "none"):
        super().__init__()
        self.pool, self.normalize = check_pool(pool), normalize
        self.over = part(Head, over, width=width)
        if self.over.pools:
            raise UserError("over must be a head that gives a vector at every position")

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(batch, width)"""
        y = pool(self.over(x, context), context, self.pool)
        return F.normalize(y, dim=-1) if self.normalize else y

    def flops(self, length: int) -> int:
        return self.over.flops(length)
