"""Dropout as a module."""

from torch import Tensor, nn

from regard.errors import UserError
from regard.ops.dispatch import hooked
from regard.ops.dropout import dropout, dropout_add


class Dropout(nn.Module):
    """y = x / (1 - rate) where x is kept, 0 elsewhere. On a CPU the rate is rounded to a multiple of 1/65536."""

    def __init__(self, rate: float = 0.0):
        super().__init__()
        if not 0 <= rate <= 1:
            raise UserError(f"dropout must be from 0 to 1, not {rate}")
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.rate) if self.training and self.rate else x

    def add(self, stream: Tensor, x: Tensor) -> Tensor:
        """Return stream + self(x), computed in one pass."""
        if hooked(self):
            return stream + self(x)
        return dropout_add(stream, x, self.rate) if self.training and self.rate else stream + x

    def extra_repr(self) -> str:
        return f"{self.rate}"
