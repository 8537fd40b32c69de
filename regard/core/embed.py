"""The contract of embeddings, which turn a batch's input into vectors."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.ops.embedding import embedding
from regard.schema import name_of, part

from .context import Context
from .dropout import Dropout
from .norm import Norm
from .position import Position


class Embed(nn.Module):
    """Maps an input to (batch, time, width). Subclasses define `forward` and `random_input`.

    position: acts on the embedded vectors: sinusoidal, learned, ...
    norm:     applied after the position.
    dim:      channels of the embedded vectors, projected to the width last (ALBERT); None: the width itself.
    table:    the matrix (vocab, dim) that a tied head or another embed may share; None: there is none.
    reads:    the kind of input: text, images, ...
    whole_words: it works best with tokens that are whole words.
    """

    folder: ClassVar[tuple[str, ...]] = ("embeds",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    reads: ClassVar[str] = "text"
    whole_words: ClassVar[bool] = False
    table: nn.Parameter | None

    def __init__(
        self,
        width: int,
        position: Position | str | dict = "none",
        norm: Norm | str | dict = "none",
        dropout: float = 0.0,
        dim: int | None = None,
    ):
        super().__init__()
        self.width, self.dim = width, dim or width
        self.position = part(Position, position, width=self.dim, dim=self.dim, heads=1)
        if any(self.position.acts(place) for place in ("query", "key", "value", "bias", "output_bias")):
            raise UserError(f"position '{name_of(self.position)}' acts in attention: name it there")
        self.norm = part(Norm, norm, width=self.dim)
        self.drop = Dropout(dropout)
        self.up = nn.Identity() if dim is None else nn.Linear(dim, width)
        self.register_parameter("table", None)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        raise NotImplementedError

    def random_input(self, batch: int, time: int) -> Tensor:
        """Return a random input of the right kind, for tests."""
        raise NotImplementedError

    def extent(self, tokens: Tensor) -> tuple[int, int]:
        """Return batch and time of the output for an input; by default the input's first two dimensions."""
        if tokens.dim() < 2:
            raise UserError(f"a batch has two dimensions, rows and time, not the shape {tuple(tokens.shape)}")
        return tokens.shape[0], tokens.shape[1]

    def add_position(self, x: Tensor, context: Context) -> Tensor:
        """x (batch, time, dim) -> (batch, time, width): apply position, norm, dropout and projection."""
        at = context.positions[:1] if context.from_start else context.positions
        return self.up(self.drop(self.norm(self.position.embed(x, at), context.valid)))

    def share(self, table: nn.Parameter) -> None:
        """Use this table instead of its own."""
        if self.table is None:
            raise UserError(f"embed '{name_of(self)}' has no table, so it cannot be tied")
        if table.shape != self.table.shape:
            raise UserError(f"an embed over {tuple(self.table.shape)} cannot share a table of {tuple(table.shape)}")
        self.table = table

    def flops(self, length: int) -> int:
        """Return the flops of matrix products for `length` positions."""
        return 2 * length * self.up.weight.numel() if isinstance(self.up, nn.Linear) else 0


def new_table(rows: int, dim: int, std: float | None = None) -> nn.Parameter:
    """Return a table (rows, dim) of normal numbers; without a `std`, rows have a length of about 1."""
    return nn.Parameter(torch.empty(rows, dim).normal_(std=dim**-0.5 if std is None else std))


def look_up(table: Tensor, ids: Tensor, name: str) -> Tensor:
    """Return rows of a table (rows, dim): ids (batch, time) -> (batch, time, dim). name: of the ids, for messages."""
    if ids.is_floating_point():
        raise UserError(f"{name} must be whole numbers, not {ids.dtype}")
    try:
        return embedding(ids, table)
    except IndexError:
        raise UserError(
            f"{name} range from {int(ids.min())} to {int(ids.max())}, but the table has rows 0 to {len(table) - 1}"
        ) from None
