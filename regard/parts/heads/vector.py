"""One projected vector per sequence, to be compared with others.

    y = act(W pool(x) + b)

With the first position, a bias and a tanh it is the pooler of Devlin et al. 2019, "BERT", arXiv:1810.04805; with
neither, the projection of Radford et al. 2021, "CLIP", arXiv:2103.00020.
"""

from torch import Tensor, nn

from regard.bases.pooling import check_pool, pool
from regard.core import Context, Head, UserError
from regard.ops.activation import activation as activate


class Vector(Head):
    """dim:     channels of the vector.
    pool:       how the valid positions become one vector: first, last, mean or max.
    activation: activation after the projection.
    bias:       the projection has a bias.
    bias:       of the map.
    """

    examples = (
        {"dim": 10},
        {"dim": 7, "pool": "first", "activation": "tanh", "bias": True},
        {"dim": 5, "pool": "mean"},
    )
    pools = True

    def __init__(
        self,
        width: int,
        dim: int,
        pool: str = "first",
        activation: str = "identity",
        bias: bool = False,
    ):
        super().__init__()
        if dim < 1:
            raise UserError(f"dim must be at least 1, not {dim}")
        self.dim, self.pool = dim, check_pool(pool)
        self.out = nn.Linear(width, dim, bias=bias)
        self.activate = activate(activation)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return vectors (batch, dim)."""
        return self.activate(self.out(pool(x, context, self.pool)))

    def flops(self, length: int) -> int:
        return 2 * self.out.weight.numel()
