"""The contract of what turns a batch's input into vectors, and what all such parts do then: place, norm, width."""

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
    """Whatever the input is -> (batch, time, width). Subclasses write `forward` and `draw`.

    position: acts on the vectors made here: sinusoidal, learned, ...
    norm:     after that.
    dim:      channels of the vectors made here, mapped to the width last (ALBERT); None: the width itself.
    table:    the matrix (vocab, dim) that a tied head or another embed may share, None when there is none.
    reads:    what its input is made of: text, images, ...
    whole_words: it does best with tokens that are whole words.
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
        if any(self.position.acts(place) for place in ("query", "key", "value", "bias", "read")):
            raise UserError(f"position '{name_of(self.position)}' acts in attention: name it there")
        self.norm = part(Norm, norm, width=self.dim)
        self.drop = Dropout(dropout)
        self.up = nn.Identity() if dim is None else nn.Linear(dim, width)
        self.register_parameter("table", None)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        raise NotImplementedError

    def draw(self, batch: int, time: int) -> Tensor:
        """A random input of the right kind, for the laws."""
        raise NotImplementedError

    def extent(self, tokens: Tensor) -> tuple[int, int]:
        """Batch and time of what it makes of an input; the input's first two dimensions unless said."""
        if tokens.dim() < 2:
            raise UserError(f"a batch has two dimensions, rows and time, not the shape {tuple(tokens.shape)}")
        return tokens.shape[0], tokens.shape[1]

    def place(self, x: Tensor, context: Context) -> Tensor:
        """x (batch, time, dim) -> (batch, time, width): position, norm, dropout and the map to the width."""
        at = context.positions[:1] if context.from_start else context.positions
        return self.up(self.drop(self.norm(self.position.embed(x, at), context.valid)))

    def share(self, table: nn.Parameter) -> None:
        """Use this table instead of the own one."""
        if self.table is None:
            raise UserError(f"embed '{name_of(self)}' has no table, so it cannot be tied")
        if table.shape != self.table.shape:
            raise UserError(f"an embed over {tuple(self.table.shape)} cannot share a table of {tuple(table.shape)}")
        self.table = table

    def flops(self, length: int) -> int:
        """Of matrix products for `length` positions."""
        return 2 * length * self.up.weight.numel() if isinstance(self.up, nn.Linear) else 0


def new_table(rows: int, dim: int, std: float | None = None) -> nn.Parameter:
    """(rows, dim), so drawn that a row is about as long as 1, unless its numbers are to have another size."""
    return nn.Parameter(torch.empty(rows, dim).normal_(std=dim**-0.5 if std is None else std))


def look_up(table: Tensor, numbers: Tensor, what: str) -> Tensor:
    """The rows of a table (rows, dim): numbers (batch, time) -> (batch, time, dim)."""
    if numbers.is_floating_point():
        raise UserError(f"{what} must be whole numbers, not {numbers.dtype}")
    try:
        return embedding(numbers, table)
    except IndexError:
        raise UserError(
            f"{what} reach from {int(numbers.min())} to {int(numbers.max())}, but the table knows 0 to {len(table) - 1}"
        ) from None
