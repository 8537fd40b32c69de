"""The last vectors as they are, and beside them a layer that makes one vector of a sequence, for those who ask.

    y_t = x_t             head.vector: tanh(W x_0 + b)

Encoders that were pretrained on pairs of texts still hold it (the "pooler"): Devlin et al. 2019, "BERT",
arXiv:1810.04805.
"""

from torch import Tensor

from regard.core import Context, Head, part


class Summary(Head):
    """vector: the head that makes that one vector: `head.vector(x, context)`; None: BERT's, as above."""

    examples = ({}, {"vector": {"part": "vector", "dim": 7, "pool": "mean"}})

    def __init__(self, width: int, vector: Head | str | dict | None = None):
        super().__init__()
        usual = {"part": "vector", "dim": width, "pool": "first", "activation": "tanh", "bias": True}
        self.vector = part(Head, usual if vector is None else vector, width=width)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(batch, time, width)"""
        return x

    def flops(self, length: int) -> int:
        return 0
