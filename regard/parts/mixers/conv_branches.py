"""Two convolutions in parallel, a norm on their sum, and a third convolution: the convolutional block of the Evolved
Transformer.

    u = norm(left(x) + right(x)),    y = last(u)          missing channels are padded with zeros

So et al. 2019, "The Evolved Transformer", arXiv:1901.11117. In its encoder: left has kernel size 1
and 4 d output channels with relu, right 3 and d/2 with relu, last is separable with 9 and d/2. In its causal decoder:
left is separable with 11 and 2 d with relu, right separable with 7 and d/2, last separable with 7 and d.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from regard.bases.convolve import centered_conv, conv_step
from regard.core import Context, Cost, Dropout, Growth, Mixer, Norm, UserError, part
from regard.ops.activation import activation as activate
from regard.schema import check_arguments


class Recent(NamedTuple):
    """The last inputs of the convolutions, with zeros before the first position."""

    inputs: Tensor  # (batch, max(left, right) - 1, width)
    hidden: Tensor  # (batch, last - 1, hidden)


class Convolution(nn.Module):
    """One convolution: over all channels, or separable (depthwise, then pointwise)."""

    def __init__(
        self, channels: int, width: int, size: int = 1, times: float = 1.0, separable: bool = False,
        activation: str = "identity",
    ):  # fmt: skip
        super().__init__()
        self.size, self.out_channels = size, int(times * width)
        if size < 1 or self.out_channels < 1:
            raise UserError(
                f"size and times must give at least one channel: size {size}, {times} times {width} channels"
            )
        self.map: nn.Linear | None = None
        if separable:
            self.kernel = nn.Conv1d(channels, channels, size, groups=channels, bias=False)
            self.map = nn.Linear(channels, self.out_channels)
        else:
            self.kernel = nn.Conv1d(channels, self.out_channels, size)
        self.activate = activate(activation)

    @property
    def weights(self) -> int:
        """The number of multiply-adds per position."""
        return self.kernel.weight.numel() + (0 if self.map is None else self.map.weight.numel())

    def step(self, x: Tensor, before: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Return the outputs for x (batch, time, channels) after the inputs `before` it, and those before the next
        step."""
        y, after = conv_step(self.kernel, x, before, context)
        return self._finish(y), after

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self._finish(centered_conv(self.kernel, x, context))

    def _finish(self, y: Tensor) -> Tensor:
        return self.activate(y if self.map is None else self.map(y))


class ConvBranches(Mixer[Recent]):
    """left, right, last: the convolutions, each a table { size, times, separable, activation }: kernel size, output
                       channels as a multiple of the width, whether it is separable, and the activation.
    causal:            the convolutions see earlier positions only; otherwise both sides, and it does not step.
    norm:              norm on the sum of left and right.
    hidden_dropout:    dropout on the outputs of left and right.
    """

    examples = (
        {
            "left": {"size": 11, "times": 2, "separable": True, "activation": "relu"},
            "right": {"size": 7, "times": 0.5, "separable": True},
            "last": {"size": 7, "separable": True},
        },
        {"left": {"size": 2}, "right": {"size": 4, "times": 1.5}, "last": {"size": 1, "times": 0.5}, "norm": "none"},
        {
            "left": {"times": 4, "activation": "relu"},
            "right": {"size": 3, "times": 0.5, "activation": "relu"},
            "last": {"size": 9, "times": 0.5, "separable": True},
            "causal": False,
        },
    )

    def __init__(
        self,
        width: int,
        left: dict,
        right: dict,
        last: dict,
        causal: bool = True,
        norm: Norm | str | dict = "layer",
        hidden_dropout: float = 0.0,
    ):
        super().__init__()
        self.width, self.causal = width, causal
        self.left, self.right = _convolution("left", left, width, width), _convolution("right", right, width, width)
        self.hidden = max(self.left.out_channels, self.right.out_channels)
        self.norm = part(Norm, norm, width=self.hidden)
        self.drop = Dropout(hidden_dropout)
        self.last = _convolution("last", last, self.hidden, width)
        if self.last.out_channels > width:
            raise UserError(f"last has {self.last.out_channels} output channels, more than the width of {width}")
        sizes = [one.size for one in (self.left, self.right, self.last)]
        if not causal and not all(size % 2 for size in sizes):
            raise UserError(f"with causal = false the sizes must be odd to have a middle, not {sizes}")

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return self.causal

    @property
    def kept(self) -> tuple[int, int]:
        """The numbers of inputs and of hidden vectors that the state keeps."""
        return max(self.left.size, self.right.size) - 1, self.last.size - 1

    def start(self, context: Context, capacity: int) -> Recent:
        batch, like = context.positions.shape[0], self.left.kernel.weight
        inputs, hidden = self.kept
        return Recent(like.new_zeros(batch, inputs, self.width), like.new_zeros(batch, hidden, self.hidden))

    def step(self, x: Tensor, state: Recent, context: Context) -> tuple[Tensor, Recent]:
        if not self.causal:
            raise UserError("convolutions with causal = false look ahead, so they do not step")
        left, inputs = self.left.step(x, state.inputs, context)
        right, _ = self.right.step(x, state.inputs, context)
        y, hidden = self.last.step(self._join(left, right, context), state.hidden, context)
        return _pad_channels(y, self.width), Recent(inputs, hidden)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if self.causal:
            return super().forward(x, context)
        return _pad_channels(
            self.last(self._join(self.left(x, context), self.right(x, context), context), context), self.width
        )

    def _join(self, left: Tensor, right: Tensor, context: Context) -> Tensor:
        left, right = (_pad_channels(self.drop(one), self.hidden) for one in (left, right))
        return self.norm(left + right, context.valid)

    def cost(self, length: int, past: int = 0) -> Cost:
        inputs, hidden = self.kept
        kept_bytes = (inputs * self.width + hidden * self.hidden) * self.left.kernel.weight.element_size()
        weights = sum(one.weights for one in (self.left, self.right, self.last))
        return Cost(2 * length * weights, kept_bytes if self.causal else 0)

    def growth(self) -> Growth:
        reach = max(self.left.size, self.right.size) + self.last.size - 1
        return Growth("k·n·d²", "1", f"n/{reach}")

    def value_path(self) -> Iterator[Tensor]:
        for one in (self.left, self.right, self.last):
            yield one.kernel.weight if one.map is None else one.map.weight


def _convolution(name: str, table: dict, channels: int, width: int) -> Convolution:
    return Convolution(**check_arguments(Convolution, table, {"channels": channels, "width": width}, name))


def _pad_channels(x: Tensor, channels: int) -> Tensor:
    """Pad x (batch, time, fewer) with zeros to (batch, time, channels)."""
    return F.pad(x, (0, channels - x.shape[-1]))
