"""A vector per token and one for each n-gram that ends there, so that a bag of words knows some of their order. N-grams
are not listed: a hash sends them to a fixed number of vectors, and some share one.

    x_t = E[w_t] + sum over k = 2..n of  G[h(w_(t-k+1), ..., w_t)]         nothing for those that begin before the text

    h(w_t) = w_t,      h(w_(t-k+1), ..., w_t) = (FACTOR h(w_(t-k+2), ..., w_t) + w_(t-k+1)) mod buckets

Joulin et al. 2016, "Bag of Tricks for Efficient Text Classification", arXiv:1607.01759.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import Context, Embed, Norm, Position, UserError
from regard.core.embed import look_up, new_table

FACTOR = 1_000_000_007  # a prime; times a token number or a bucket it stays within 64 bits


class Ngrams(Embed):
    """Takes tokens (batch, time) of whole texts, or what `cut` makes of them (batch, time, n).

    n:        tokens of the longest n-grams; 1: the tokens alone.
    buckets:  vectors that all n-grams share.
    position: added to the vectors; fastText has none.
    norm:     after that.
    dim:      channels of the tables, mapped to the width last; None: the width itself.
    std:      of the tables' numbers at birth; None: 1 / dim, about as small as fastText's.
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
        """(batch, time) -> (batch, time, n): each token after the n - 1 before it, with -1 before the text."""
        time, padded = tokens.shape[1], F.pad(tokens, (self.n - 1, 0), value=-1)
        return torch.stack([padded[:, begin : begin + time] for begin in range(self.n)], -1)

    def codes(self, windows: Tensor, k: int) -> Tensor:
        """(batch, time, n) -> (batch, time): the bucket of the k tokens that end at each position."""
        code = windows[..., -1]
        for back in range(2, k + 1):
            code = (code * FACTOR + windows[..., -back]) % self.buckets
        return code

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        if tokens.dim() == 2 and self.n > 1 and not context.from_start:
            raise UserError("n-grams need the whole text at once, so that a model with them does not step")
        windows = self.cut(tokens) if tokens.dim() == 2 else tokens
        x = look_up(self.table, windows[..., -1], "tokens")
        for k in range(2, self.n + 1):
            found = look_up(self.ngram_table, self.codes(windows, k), "buckets")  # type: ignore[arg-type]
            x = x + found.masked_fill((windows[..., -k] < 0)[..., None], 0.0)
        return self.add_position(x, context)

    def random_input(self, batch: int, time: int) -> Tensor:
        return self.cut(torch.randint(self.vocab, (batch, time)))
