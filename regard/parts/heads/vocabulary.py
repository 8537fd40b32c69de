"""Language-model head: logits over the vocabulary, from a table of its own or that of the embedding.

    logits = scale E x + b       with a softcap c: c tanh(logits / c)       with hidden: x <- norm(act(W x + a)) first

Tied: Press & Wolf 2017, arXiv:1608.05859. A hidden layer: Devlin et al. 2019, "BERT", arXiv:1810.04805. Softcap:
Gemma Team 2024, "Gemma 2", arXiv:2408.00118.
"""

import torch
from torch import Tensor, nn

from regard.core import Context, Head, Norm, UserError, part
from regard.core.contracts import new_table
from regard.ops.activation import activation as activate
from regard.ops.linear import linear


class Vocabulary(Head):
    """bias:    a learned bias per token.
    hidden:     width of a linear layer with activation and norm before the table, as in BERT; None: there is none.
    activation: activation of that layer.
    norm:       norm of that layer.
    scale:      factor on the logits; "width": 1 / sqrt(width), as in T5 with tied embeddings.
    softcap:    logits are squashed to stay below this in absolute value; None: they are not.
    spare:      an unused second bias is stored, as in checkpoints whose head is not tied to the embedding.
    """

    examples = ({}, {"bias": True, "scale": "width"}, {"hidden": 10, "bias": True, "softcap": 2.5})

    def __init__(
        self,
        width: int,
        vocab: int,
        bias: bool = False,
        hidden: int | None = None,
        activation: str = "gelu",
        norm: Norm | str | dict = "layer",
        scale: float | str = 1.0,
        softcap: float | None = None,
        spare: bool = False,
    ):
        super().__init__()
        if softcap is not None and softcap <= 0:
            raise UserError(f"softcap must be above 0, not {softcap}")
        self.into = None if hidden is None else nn.Linear(width, hidden)
        self.activate = activate(activation)
        self.norm = part(Norm, "none" if hidden is None else norm, width=hidden or width)
        self.table = new_table(vocab, hidden or width)
        self.bias = nn.Parameter(nn.init.zeros_(torch.empty(vocab))) if bias else None
        self.register_buffer("spare", torch.zeros(vocab) if spare else None)
        if isinstance(scale, str) and scale != "width":
            raise UserError(f"scale is a number or 'width', not '{scale}'")
        self.scale, self.softcap = width**-0.5 if isinstance(scale, str) else scale, softcap

    def forward(self, x: Tensor, context: Context) -> Tensor:
        logits = linear(self.transform(x, context), self.table, self.bias)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def transform(self, x: Tensor, context: Context) -> Tensor:
        """Return the vectors that are multiplied by the table: (batch, time, hidden or width)."""
        if self.into is not None:
            x = self.norm(self.activate(self.into(x)), context.valid)
        return x if self.scale == 1 else x * self.scale

    def linear(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor | None] | None:
        return None if self.softcap is not None else (self.transform(x, context), self.table, self.bias)

    def share(self, table: nn.Parameter) -> None:
        if table.shape != self.table.shape:
            raise UserError(f"a head over {tuple(self.table.shape)} cannot be tied to a table of {tuple(table.shape)}")
        self.table = table

    def flops(self, length: int) -> int:
        return 2 * length * (self.table.numel() + (0 if self.into is None else self.into.weight.numel()))
