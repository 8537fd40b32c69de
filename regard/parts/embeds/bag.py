"""Bag-of-words input: the vector of a position is the sum of the embeddings of its words, or of any other features.

    x = sum over words w of  count_w E[w]          with shares: count_w / sum of counts

The first layer of graph networks on texts, such as GAT's on Cora: Veličković et al. 2018, arXiv:1710.10903.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Context, Embed, UserError


class Bag(Embed):
    """vocab: number of words or features; the input is (batch, time, vocab), dense or a sparse COO tensor.
    shares:   divide the counts of a position by their sum, unless that is 0.
    dropout:  dropout on the counts.
    """

    examples = ({}, {"shares": True})

    def __init__(self, width: int, vocab: int, shares: bool = False, dropout: float = 0.0):
        super().__init__(width, dropout=dropout)
        self.vocab, self.shares = vocab, shares
        self.table = nn.Parameter(torch.empty(vocab, width))
        nn.init.xavier_uniform_(self.table)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        if tokens.dim() != 3 or tokens.shape[-1] != self.vocab or not tokens.is_floating_point():
            raise UserError(
                f"the input must be numbers of shape (batch, time, {self.vocab}), "
                f"not {tokens.dtype} {tuple(tokens.shape)}"
            )
        counts = tokens.to(self.table.dtype)
        if tokens.is_sparse:
            return self._sparse(counts.coalesce())
        if self.shares:
            counts = counts / _nonzero(counts.sum(-1, keepdim=True))
        return F.linear(self.drop(counts), self.table.T)

    def _sparse(self, counts: Tensor) -> Tensor:
        batch, time, vocab = counts.shape
        row, at, word = counts.indices()
        row, values = row * time + at, counts.values()
        if self.shares:
            values = values / _nonzero(values.new_zeros(batch * time).index_add(0, row, values))[row]
        indices = torch.stack((row, word))
        shape, trusted = (batch * time, vocab), {"is_coalesced": True, "check_invariants": False}
        bags = torch.sparse_coo_tensor(indices, self.drop(values), shape, **trusted)
        return torch.sparse.mm(bags, self.table).unflatten(0, (batch, time))

    def random_input(self, batch: int, time: int) -> Tensor:
        return torch.rand(batch, time, self.vocab, dtype=self.table.dtype)

    def flops(self, length: int) -> int:
        """Count the flops of a dense input."""
        return 2 * length * self.table.numel()


def _nonzero(total: Tensor) -> Tensor:
    return torch.where(total == 0, 1, total)
