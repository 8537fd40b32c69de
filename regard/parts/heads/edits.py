"""Heads of an editing decoder: which tokens to delete, how many to insert between two tokens, and which ones.

    delete_i = W x_i        insert_i = V [x_i, x_(i+1)]        token = vocabulary

Gu et al. 2019, "Levenshtein Transformer", arXiv:1905.11006.
"""

import torch
from torch import Tensor, nn

from regard.bases.structured import StructuredHead
from regard.core import UserError


class Edits(StructuredHead):
    """most: the most tokens that are inserted between two others at a time.
    deletes: it deletes, too. False: it only inserts, as the insertion transformer does.
    bias:    a learned bias per token.
    """

    examples = ({"most": 5}, {"most": 5, "deletes": False})

    def __init__(self, width: int, vocab: int, most: int = 255, deletes: bool = True, bias: bool = False):
        super().__init__(width, vocab, bias)
        if not 1 <= most <= 10_000:
            raise UserError(f"most must be from 1 to 10,000, not {most}")
        self.most = most
        self.insert = nn.Linear(2 * width, most + 1)
        self.delete = nn.Linear(width, 2) if deletes else None

    def insertions(self, x: Tensor) -> Tensor:
        """Return logits (batch, n - 1, most + 1) of the number of tokens between two neighbors of n."""
        return self.insert(torch.cat((x[:, :-1], x[:, 1:]), -1))
