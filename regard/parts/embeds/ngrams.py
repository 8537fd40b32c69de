"""Token embedding plus an embedding of each n-gram that ends at the position, so that a bag of words keeps some word
order. N-grams are hashed into a fixed number of buckets, and some of them collide.

    x_t = E[w_t] + sum over k = 2..n of  G[h(w_(t-k+1), ..., w_t)]         without n-grams that begin before the text

    h(w_t) = w_t,      h(w_(t-k+1), ..., w_t) = (FACTOR h(w_(t-k+2), ..., w_t) + w_(t-k+1)) mod buckets

Joulin et al. 2016, "Bag of Tricks for Efficient Text Classification", arXiv:1607.01759.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import Context, Embed, Norm, Position, UserError
from regard.core.contracts import look_up, new_table

FACTOR = 1_000_000_007  # a prime; its product with a token id or a bucket fits into 64 bits


class Ngrams(Embed):
    """Takes tokens (batch, time) of whole texts, or the windows that `cut` makes of them (batch, time, n).

    n:        length of the longest n-grams; 1: only the tokens.
    buckets:  number of vectors that all n-grams share.
    position: position added to the vectors; fastText has none.
    norm:     norm after that.
    dim:      channels of the tables, projected to the width at the end; None: the width.
    std:      standard deviation of the initial tables; None: 1 / dim, about that of fastText.
    """

    whole_words = True
    examples = ({"buckets": 37}, {"n": 3, "buckets": 101, "position": "sinusoidal", "norm": "layer"}, {"dim": 10})

    def __init__(
        self,
        width: int,
        vocab: int,
        n: int = 2,
        buckets: int = 65521,
        position: Position | str | dict = "none",
        norm: Norm | str | dict = "none",
        dropout: float = 0.0,
        dim: int | None = None,
        std: float | None = None,
    ):
        super().__init__(width, position, norm, dropout, dim)
        for name, value in (("n", n), ("buckets", buckets)):
            if value < 1:
                raise UserError(f"{name} must be at least 1, not {value}")
        self.vocab, self.n, self.buckets = vocab, n, buckets
        std = 1 / self.dim if std is None else std
        self.table = new_table(vocab, self.dim, std)
        self.ngram_table = new_table(buckets, self.dim, std) if n > 1 else None

    def cut(self, tokens: Tensor) -> Tensor:
        """Return each token with the n - 1 before it, -1 before the text: (batch, time) -> (batch, time, n)."""
        time, padded = tokens.shape[1], F.pad(tokens, (self.n - 1, 0), value=-1)
        return torch.stack([padded[:, begin : begin + time] for begin in range(self.n)], -1)

    def codes(self, windows: Tensor, k: int) -> Tensor:
        """Return the bucket of the k-gram that ends at each position: (batch, time, n) -> (batch, time)."""
        code = windows[..., -1]
        for back in range(2, k + 1):
            code = (code * FACTOR + windows[..., -back]) % self.buckets
        return code

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        if tokens.dim() == 2 and self.n > 1 and not context.from_start:
            raise UserError("n-grams need the whole text at once, so a model with them does not step")
        windows = self.cut(tokens) if tokens.dim() == 2 else tokens
        x = look_up(self.table, windows[..., -1], "tokens")
        for k in range(2, self.n + 1):
            found = look_up(self.ngram_table, self.codes(windows, k), "buckets")  # type: ignore[arg-type]
            x = x + found.masked_fill((windows[..., -k] < 0)[..., None], 0.0)
        return self.add_position(x, context)

    def random_input(self, batch: int, time: int) -> Tensor:
        return self.cut(torch.randint(self.vocab, (batch, time)))
