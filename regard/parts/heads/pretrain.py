"""BERT's two pretraining heads: logits over the vocabulary at every position, and logits for the relation of a pair of
texts, read from the first position.

    tokens:  E norm(act(W x_t + a)) + b           the masked token
    pair:    V tanh(U x_0 + c) + d                whether the second text follows the first

Devlin et al. 2019, "BERT", arXiv:1810.04805; ALBERT predicts the order of the two: Lan et al. 2020, arXiv:1909.11942.
"""

from torch import Tensor

from regard.core import Context, Embed, Head, UserError, part

PAIR = {"part": "classify", "classes": 2, "pool": "first"}


class Pretrain(Head):
    """tokens: head of the model's logits, which answers at every position.
    pair:      head of the pair, which answers once per sequence: `head.pair(x, context)`.
    """

    examples = (
        {},
        {
            "tokens": {"part": "vocabulary", "hidden": 10, "bias": True},
            "pair": {"part": "classify", "classes": 3, "pool": "first", "hidden": 7},
        },
    )

    def __init__(
        self,
        width: int,
        vocab: int,
        tokens: Head | str | dict = "vocabulary",
        pair: Head | str | dict | None = None,
    ):
        super().__init__()
        self.tokens = part(Head, tokens, width=width, vocab=vocab)
        self.pair = part(Head, PAIR if pair is None else pair, width=width, vocab=vocab)
        if self.tokens.pools or not self.pair.pools:
            raise UserError("tokens must be a head that answers at every position, and pair one that answers once")
        self.streams = self.tokens.streams

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return logits (batch, time, vocab)."""
        return self.tokens(x, context)

    def linear(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor | None] | None:
        return self.tokens.linear(x, context)

    def tie(self, embed: Embed) -> None:
        self.tokens.tie(embed)

    def flops(self, length: int) -> int:
        return self.tokens.flops(length)
