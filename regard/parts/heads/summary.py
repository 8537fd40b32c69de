"""The last hidden states, with a pooler that is stored beside them and makes one vector of a sequence on request.

    y_t = x_t             head.vector: tanh(W x_0 + b)

Encoders that were pretrained on pairs of texts have this pooler: Devlin et al. 2019, "BERT",
arXiv:1810.04805.
"""

from torch import Tensor

from regard.core import Context, Head, part


class Summary(Head):
    """vector: head that pools, called as `head.vector(x, context)`; None: that of BERT, as above."""

    examples = ({}, {"vector": {"part": "vector", "dim": 7, "pool": "mean"}})

    def __init__(self, width: int, vector: Head | str | dict | None = None):
        super().__init__()
        pooler = {"part": "vector", "dim": width, "pool": "first", "activation": "tanh", "bias": True}
        self.vector = part(Head, pooler if vector is None else vector, width=width)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return x (batch, time, width) unchanged."""
        return x

    def flops(self, length: int) -> int:
        return 0
