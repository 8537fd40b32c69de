"""The base of heads that say more than a token at each position: which tokens go together, follow each other, or go."""

from __future__ import annotations

from torch import Tensor, nn

from regard.core import Context, Head, part


class StructuredHead(Head):
    """Logits over the vocabulary as the head `vocabulary` has them, for decoders that write all tokens at once."""

    streams = False

    def __init__(self, width: int, vocab: int, bias: bool = False):
        super().__init__()
        self.vocabulary = part(Head, {"part": "vocabulary", "bias": bias}, width=width, vocab=vocab)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.vocabulary(x, context)

    def linear(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor | None] | None:
        return self.vocabulary.linear(x, context)

    def share(self, table: nn.Parameter) -> None:
        self.vocabulary.share(table)

    def flops(self, length: int) -> int:
        """Return the flops of the logits; what a search adds depends on the search."""
        return self.vocabulary.flops(length)
