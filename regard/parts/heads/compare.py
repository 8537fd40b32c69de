"""What is between two texts that stand one after the other: each becomes one vector, and the two are compared channel
by channel. The sum of the products is `width` times the cosine.

    u, v   = the sums of the vectors of the first and of the second text, brought to length sqrt(width)
    scores = W [u * v, |u - v|, u, v] + b

Features: Conneau et al. 2017, "Supervised Learning of Universal Sentence Representations from Natural Language
Inference Data", arXiv:1705.02364. Sums of word vectors: Wieting et al. 2016, "Towards Universal Paraphrastic Sentence
Embeddings", arXiv:1511.08198.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Context, Dropout, Head, UserError

LEAST = 1e-4  # length of a vector that can be brought to another one


class Compare(Head):
    """classes: how many; None: a number is told instead.
    dropout:    before the last map.

    Which of the texts a position is of stands in `context.segments`: 0 for the first, anything else for the second.
    Without segments, all are of the first, and the second is nothing.
    """

    examples = ({"classes": 3}, {})
    pools = True

    def __init__(self, width: int, classes: int | None = None, dropout: float = 0.0):
        super().__init__()
        if classes is not None and classes < 2:
            raise UserError(f"classes must be at least 2, not {classes}; for one number leave them out")
        self.classes, self.width = classes, width
        self.drop = Dropout(dropout)
        self.out = nn.Linear(4 * width, classes or 1)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(batch, classes), or (batch, 1) for a number"""
        segments = context.segments
        second = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device) if segments is None else segments > 0
        real = torch.ones_like(second) if context.valid is None else context.valid
        u, v = self._of(x, real & ~second), self._of(x, real & second)
        return self.out(self.drop(torch.cat((u * v, (u - v).abs(), u, v), -1)))

    def _of(self, x: Tensor, mine: Tensor) -> Tensor:
        """(batch, time, width), (batch, time) -> (batch, width)"""
        total = x.masked_fill(~mine[..., None], 0.0).sum(1)
        return math.sqrt(self.width) * F.normalize(total, dim=-1, eps=LEAST)

    def flops(self, length: int) -> int:
        return 2 * self.out.weight.numel()
