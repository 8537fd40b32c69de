"""Sequence classification: logits over the classes, once per sequence.

    logits = W pool(x) + b          with hidden: W act(V pool(x) + a) + b

With pool = "first" and a tanh layer it is that of Devlin et al. 2019, "BERT", arXiv:1810.04805.
"""

from torch import Tensor, nn

from regard.bases.pooling import check_pool, pool
from regard.core import Context, Dropout, Head, UserError
from regard.ops.activation import activation as activate


class Classify(Head):
    """classes: number of classes.
    pool:       how the valid positions become one vector: first, last, mean or max.
    hidden:     channels of a hidden layer; None: there is none.
    activation: activation of the hidden layer.
    dropout:    dropout before the last linear layer.
    """

    examples = (
        {"classes": 7},
        {"classes": 3, "pool": "first", "hidden": 10},
        {"classes": 5, "pool": "last", "bias": False},
        {"classes": 2, "pool": "max", "hidden": 6, "activation": "relu"},
    )
    pools = True

    def __init__(
        self,
        width: int,
        classes: int,
        pool: str = "mean",
        hidden: int | None = None,
        activation: str = "tanh",
        dropout: float = 0.0,
        bias: bool = True,
    ):
        super().__init__()
        if classes < 2:
            raise UserError(f"classes must be at least 2, not {classes}; for one number there is the head 'regress'")
        self.classes, self.pool = classes, check_pool(pool)
        self.into = None if hidden is None else nn.Linear(width, hidden)
        self.activate = activate(activation)
        self.drop = Dropout(dropout)
        self.out = nn.Linear(hidden or width, classes, bias=bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return logits (batch, classes)."""
        x = pool(x, context, self.pool)
        if self.into is not None:
            x = self.activate(self.into(x))
        return self.out(self.drop(x))

    def flops(self, length: int) -> int:
        return 2 * (self.out.weight.numel() + (0 if self.into is None else self.into.weight.numel()))
