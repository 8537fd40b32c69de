"""Regression: one or more numbers per sequence, such as a rating or a similarity.

y = W pool(x) + b          with hidden: W act(V pool(x) + a) + b
"""

from torch import Tensor, nn

from regard.bases.pooling import check_pool, pool
from regard.core import Context, Dropout, Head, UserError
from regard.ops.activation import activation as activate


class Regress(Head):
    """outputs: number of outputs.
    pool:       how the valid positions become one vector: first, last, mean or max.
    hidden:     channels of a hidden layer; None: there is none.
    activation: activation of the hidden layer.
    dropout:    dropout before the last linear layer.
    """

    examples = (
        {},
        {"outputs": 3, "pool": "max"},
        {"outputs": 2, "pool": "last"},
        {"pool": "first", "hidden": 10},
    )
    pools = True

    def __init__(
        self,
        width: int,
        outputs: int = 1,
        pool: str = "mean",
        hidden: int | None = None,
        activation: str = "tanh",
        dropout: float = 0.0,
    ):
        super().__init__()
        if outputs < 1:
            raise UserError(f"outputs must be at least 1, not {outputs}")
        self.outputs, self.pool = outputs, check_pool(pool)
        self.into = None if hidden is None else nn.Linear(width, hidden)
        self.activate = activate(activation)
        self.drop = Dropout(dropout)
        self.out = nn.Linear(hidden or width, outputs)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return numbers (batch, outputs)."""
        x = pool(x, context, self.pool)
        if self.into is not None:
            x = self.activate(self.into(x))
        return self.out(self.drop(x))

    def flops(self, length: int) -> int:
        return 2 * (self.out.weight.numel() + (0 if self.into is None else self.into.weight.numel()))
