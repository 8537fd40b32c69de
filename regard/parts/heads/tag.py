"""Token classification: logits over the classes at every position, such as parts of speech.

logits = W x + b
"""

from torch import Tensor, nn

from regard.core import Context, Dropout, Head, UserError


class Tag(Head):
    """classes: number of classes.
    dropout:    dropout before the linear layer.
    """

    examples = ({"classes": 7}, {"classes": 2, "bias": False})

    def __init__(self, width: int, classes: int, dropout: float = 0.0, bias: bool = True):
        super().__init__()
        if classes < 2:
            raise UserError(f"classes must be at least 2, not {classes}")
        self.classes = classes
        self.drop = Dropout(dropout)
        self.out = nn.Linear(width, classes, bias=bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return logits (batch, time, classes)."""
        return self.out(self.drop(x))

    def flops(self, length: int) -> int:
        return 2 * length * self.out.weight.numel()
