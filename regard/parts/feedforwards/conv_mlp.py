"""A feed-forward of two convolutions over positions. With kernel size 1 it is `mlp`; larger kernels see neighbors.

    y = W_2 * act(W_1 * x + b_1) + b_2          * is a convolution

Vaswani et al. 2017, section 3.3, arXiv:1706.03762; sizes 9 and 1: Ren et al. 2019, "FastSpeech", arXiv:1905.09263.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from regard.bases.convolve import centered_conv, conv_step
from regard.core import Context, Cost, Dropout, Growth, Mixer, UserError
from regard.ops.activation import activation as activate


class Tail(NamedTuple):
    """The last inputs of the two convolutions, with zeros before the first position."""

    first: Tensor  # (batch, size - 1, width)
    second: Tensor  # (batch, second - 1, hidden)


class ConvMlp(Mixer[Tail]):
    """hidden:     channels between the convolutions; None: four times the width.
    size:          kernel size of the first convolution.
    second:        kernel size of the second convolution.
    causal:        the convolutions see earlier positions only; otherwise both sides, and it does not step.
    activation:    relu, gelu, ...
    """

    examples = (
        {},
        {"size": 3, "second": 2, "hidden": 10, "activation": "gelu"},
        {"size": 9, "hidden": 10, "bias": False},
        {"size": 5, "second": 3, "hidden": 10, "causal": False},
    )

    def __init__(
        self,
        width: int,
        hidden: int | None = None,
        size: int = 1,
        second: int = 1,
        causal: bool = True,
        activation: str = "relu",
        bias: bool = True,
        hidden_dropout: float = 0.0,
    ):
        super().__init__()
        hidden = 4 * width if hidden is None else hidden
        if min(size, second) < 1:
            raise UserError(f"size and second must be at least 1, not {size} and {second}")
        if not causal and not (size % 2 and second % 2):
            raise UserError(f"with causal = false the sizes must be odd to have a middle, not {size} and {second}")
        self.width, self.causal = width, causal
        self.into, self.out = nn.Conv1d(width, hidden, size, bias=bias), nn.Conv1d(hidden, width, second, bias=bias)
        self.activate = activate(activation)
        self.drop = Dropout(hidden_dropout)

    @property
    def sizes(self) -> tuple[int, int]:
        return self.into.kernel_size[0], self.out.kernel_size[0]

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return self.causal or self.sizes == (1, 1)

    def start(self, context: Context, capacity: int) -> Tail:
        batch, like = context.positions.shape[0], self.into.weight
        size, second = self.sizes
        return Tail(
            like.new_zeros(batch, size - 1, self.width), like.new_zeros(batch, second - 1, self.out.in_channels)
        )

    def step(self, x: Tensor, state: Tail, context: Context) -> tuple[Tensor, Tail]:
        if not self.streams:
            raise UserError("a convolution with causal = false looks ahead, so it does not step")
        hidden, first = conv_step(self.into, x, state.first, context)
        y, second = conv_step(self.out, self.drop(self.activate(hidden)), state.second, context)
        return y, Tail(first, second)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if self.streams:
            return super().forward(x, context)
        hidden = centered_conv(self.into, x, context)
        return centered_conv(self.out, self.drop(self.activate(hidden)), context)

    def cost(self, length: int, past: int = 0) -> Cost:
        weights = self.into.weight.numel() + self.out.weight.numel()
        size, second = self.sizes
        kept = (size - 1) * self.width + (second - 1) * self.out.in_channels if self.streams else 0
        return Cost(2 * length * weights, kept * self.into.weight.element_size())

    def growth(self) -> Growth:
        return super().growth() if self.sizes == (1, 1) else Growth("k·n·d²", "1", "n/k")

    def value_path(self) -> Iterator[Tensor]:
        yield from (self.into.weight, self.out.weight)
