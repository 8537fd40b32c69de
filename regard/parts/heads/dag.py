"""A directed acyclic graph over the positions of a long canvas: every position says a token and links to later ones.

    link(i -> j) = sum over heads h of gate_h(x_i) softmax over j > i of (q_h(x_i) . k_h(x_j) / sqrt(d))

Huang et al. 2022, "Directed Acyclic Transformer for Non-Autoregressive Machine Translation", arXiv:2205.07459.
"""

import torch
from torch import Tensor, nn

from regard.bases.structured import StructuredHead
from regard.core import Context, UserError


class Dag(StructuredHead):
    """heads: of the links.
    bias:     a learned bias per token.
    """

    examples = ({"heads": 2},)

    def __init__(self, width: int, vocab: int, heads: int = 8, bias: bool = False):
        super().__init__(width, vocab, bias)
        if heads < 1 or width % heads:
            raise UserError(f"width {width} is not divisible by {heads} heads of the graph's links: change head.heads")
        self.heads = heads
        self.q, self.k, self.gate = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, heads)

    def links(self, x: Tensor, context: Context) -> Tensor:
        """Return log-probabilities (batch, n, n) from row to column, -inf for what does not lead forward to a real
        position. The last position has no link."""
        n = x.shape[1]
        q, k = (map(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for map in (self.q, self.k))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        at = torch.arange(n, device=x.device)
        allowed = at[:, None] < at  # (n, n)
        if context.valid is not None:
            allowed = allowed & context.valid[:, None, None]
        # rows without any link get finite numbers first, since a softmax over nothing has no gradient
        none = ~allowed.any(-1, keepdim=True)
        logs = scores.masked_fill(~(allowed | none), -torch.inf).log_softmax(-1)
        logs = logs.masked_fill(~allowed, torch.finfo(logs.dtype).min / 4)
        gates = self.gate(x).log_softmax(-1).transpose(1, 2)[..., None]
        total = (logs + gates).logsumexp(1)
        return total.masked_fill(~allowed.expand_as(logs)[:, 0], -torch.inf)
