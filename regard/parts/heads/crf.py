"""A linear-chain CRF over the positions of a canvas: neighboring tokens are chosen together.

    score(y) = sum of logits_i(y_i) + sum of left[y_(i-1)] (I + M_i) right[y_i]        M_i = MLP([x_(i-1), x_i])

Sun et al. 2019, "Fast Structured Decoding for Sequence Models", arXiv:1910.11555.
"""

import torch
from torch import Tensor, nn

from regard.bases.structured import StructuredHead
from regard.core import Context, UserError
from regard.core.contracts import new_table
from regard.ops import crf


class Crf(StructuredHead):
    """rank:      channels of the two tables of transitions.
    candidates:   tokens of each position that are summed and searched over.
    dynamic:      transitions also depend on the position.
    bias:         a learned bias per token.
    """

    examples = ({"rank": 4, "candidates": 6}, {"rank": 4, "candidates": 6, "dynamic": True})

    def __init__(
        self,
        width: int,
        vocab: int,
        rank: int = 32,
        candidates: int = 64,
        dynamic: bool = False,
        bias: bool = False,
    ):
        super().__init__(width, vocab, bias)
        if candidates < 1 or not 1 <= rank <= 1024:
            raise UserError(f"candidates must be at least 1, and rank from 1 to 1,024, not {candidates} and {rank}")
        self.candidates, self.rank = candidates, rank
        self.left, self.right = new_table(vocab, rank), new_table(vocab, rank)
        self.dynamic = (
            nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, rank * rank)) if dynamic else None
        )

    def _dynamic(self, x: Tensor) -> Tensor | None:
        """Return M (batch, n - 1, rank, rank)."""
        if self.dynamic is None:
            return None
        return self.dynamic(torch.cat((x[:, :-1], x[:, 1:]), -1)).unflatten(-1, (self.rank, self.rank))

    def log_likelihood(self, x: Tensor, context: Context, targets: Tensor) -> Tensor:
        """Return log p (batch,) of the targets (batch, n)."""
        return crf.log_likelihood(
            self(x, context), self.left, self.right, targets, self.candidates, context.valid, self._dynamic(x)
        )

    def transitions(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return the scores (batch, n - 1, k, k) of going from each of the tokens (batch, n, k) of a position to each
        of the next one."""
        return crf.transitions(self.left, self.right, tokens, self._dynamic(x))

    def best(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Return the best tokens (batch, n) together, and their log-probability (batch,)."""
        emissions = self(x, context)
        tokens = crf.candidates(emissions, self.candidates)
        emitted, steps = emissions.gather(2, tokens), self.transitions(x, tokens)
        chosen, score = crf.viterbi(emitted, steps, context.valid)
        return tokens.gather(2, chosen[..., None])[..., 0], score - crf.log_partition(emitted, steps, context.valid)
