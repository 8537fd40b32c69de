"""Vector input, such as sensor readings or features: a linear layer projects it to the width.

x = W input + b + p
"""

import torch
from torch import Tensor, nn

from regard.core import Context, Embed, Norm, Position, UserError


class Vectors(Embed):
    """channels: channels of the input, which is (batch, time, channels).
    position:    position added after the projection.
    norm:        norm after that.
    """

    examples = ({"channels": 5}, {"channels": 3, "bias": False, "position": "sinusoidal", "norm": "layer"})

    def __init__(
        self,
        width: int,
        channels: int,
        bias: bool = True,
        position: Position | str | dict = "none",
        norm: Norm | str | dict = "none",
        dropout: float = 0.0,
    ):
        super().__init__(width, position, norm, dropout)
        if channels < 1:
            raise UserError(f"channels must be at least 1, not {channels}")
        self.into = nn.Linear(channels, width, bias=bias)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        if tokens.dim() != 3 or tokens.shape[-1] != self.into.in_features or not tokens.is_floating_point():
            raise UserError(
                f"the input must be numbers of shape (batch, time, {self.into.in_features}), "
                f"not {tokens.dtype} {tuple(tokens.shape)}"
            )
        return self.add_position(self.into(tokens), context)

    def random_input(self, batch: int, time: int) -> Tensor:
        return torch.randn(batch, time, self.into.in_features, dtype=self.into.weight.dtype)

    def flops(self, length: int) -> int:
        return 2 * length * self.into.weight.numel()
