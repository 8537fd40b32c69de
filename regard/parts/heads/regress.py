"""Numbers, once per sequence: a price, a rating, a similarity.

y = W pool(x) + b
"""

from torch import Tensor, nn

from regard.core import Context, Dropout, Head, UserError
from regard.core.head import check_pool, pool


class Regress(Head):
    """outputs: how many numbers.
    pool:       one vector of all real positions: first, last, mean or max.
    dropout:    before the map.
    """

    examples = ({}, {"outputs": 3, "pool": "max"}, {"outputs": 2, "pool": "last"}, {"pool": "first"})
    pools = True

    def __init__(self, width: int, outputs: int = 1, pool: str = "mean", dropout: float = 0.0):
        super().__init__()
        if outputs < 1:
            raise UserError(f"outputs must be at least 1, not {outputs}")
        self.outputs, self.pool = outputs, check_pool(pool)
        self.drop = Dropout(dropout)
        self.out = nn.Linear(width, outputs)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(batch, outputs)"""
        return self.out(self.drop(pool(x, context, self.pool)))

    def flops(self, length: int) -> int:
        return 2 * self.out.weight.numel()
