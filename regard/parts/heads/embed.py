"""Sentence embedding: one pooled vector per text, so that texts of similar meaning have similar vectors.

    y = pool(x)          with normalize:  y / |y|, so that a dot product is a cosine

Reimers & Gurevych 2019, "Sentence-BERT", arXiv:1908.10084.
"""

import torch.nn.functional as F
from torch import Tensor

from regard.bases.pooling import check_pool, pool
from regard.core import Context, Head, UserError, part


class Embed(Head):
    """pool: how the valid positions become one vector: first, last, mean or max.
    normalize: scale the vector to length one.
    over:    head that is applied before pooling: "none", or "summary", which also keeps BERT's pooler.
    """

    examples = ({}, {"pool": "first", "normalize": True}, {"pool": "max", "over": "summary"})
    pools = True

    def __init__(self, width: int, pool: str = "mean", normalize: bool = False, over: Head | str | dict = "none"):
        super().__init__()
        self.pool, self.normalize = check_pool(pool), normalize
        self.over = part(Head, over, width=width)
        if self.over.pools:
            raise UserError("over must be a head that returns a vector at every position")

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return vectors (batch, width)."""
        y = pool(self.over(x, context), context, self.pool)
        return F.normalize(y, dim=-1) if self.normalize else y

    def flops(self, length: int) -> int:
        return self.over.flops(length)
