"""Involution: the kernel of a position is computed from its own vector and shared by many channels, whereas the kernel
of a convolution belongs to a channel and is shared by all positions.

    H_t   = W_span relu(norm(W_reduce x_t))                    one kernel per group of channels
    y_t,c = sum over k of  H_t,g(c),k  x_(t+k),c               the last `size` positions, or as many around t

Li et al. 2021, "Involution: Inverting the Inherence of Convolution for Visual Recognition", arXiv:2103.06255. In the
paper a position is a pixel and a kernel a square of size^2; here that is `columns`, and the default is one-dimensional.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Context, Cost, Growth, Mixer, Norm, UserError, part


class Recent(NamedTuple):
    """The last inputs of the kernels."""

    inputs: Tensor  # (batch, size - 1, width), oldest first, zeros before the start


class Involution(Mixer[Recent]):
    """A convolution whose kernels are computed from the input.

    size:      kernel size, or side of the square kernel.
    group:     number of channels that share a kernel.
    reduction: the kernels are computed through a bottleneck of width / reduction channels.
    norm:      norm in the bottleneck. The paper has batch norm, which sees the future in training.
    causal:    see earlier positions only; otherwise both sides, and the whole sequence is needed at once.
    columns:   the sequence is an image with rows of so many pixels, read row by row, and kernels are square_windows
               around a pixel; None: it is one-dimensional.
    """

    examples = (
        {"size": 4, "group": 8},
        {"size": 1, "group": 24, "reduction": 3, "norm": "batch"},
        {"size": 5, "group": 4, "causal": False, "norm": "none"},
        {"size": 4, "group": 8, "causal": False},
        {"size": 3, "group": 8, "causal": False, "columns": 5, "norm": "batch"},
    )

    def __init__(
        self,
        width: int,
        size: int = 7,
        group: int = 16,
        reduction: int = 4,
        norm: Norm | str | dict = "layer",
        causal: bool = True,
        columns: int | None = None,
    ):
        super().__init__()
        if min(size, group, reduction) < 1 or width % group or width < reduction:
            raise UserError(
                f"size, group and reduction must be at least 1, group divide the width of {width} and reduction not "
                f"exceed it, not {size}, {group} and {reduction}"
            )
        if columns is not None and (columns < 1 or causal or size % 2 == 0):
            raise UserError(
                "kernels on an image of columns (at least 1) see all sides: set causal = false, and an odd size"
            )
        self.width, self.size, self.group, self.causal, self.columns = width, size, group, causal, columns
        self.groups, self.taps = width // group, size if columns is None else size**2
        self.norm = part(Norm, norm, width=width // reduction)
        needs_bias = not any(True for _ in self.norm.parameters())  # the norm has none
        self.reduce = nn.Linear(width, width // reduction, bias=needs_bias)
        self.span = nn.Linear(width // reduction, self.groups * self.taps)

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return self.causal

    def kernels(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the kernels (batch, time, groups, taps) of x (batch, time, width)."""
        made = self.span(F.relu(self.norm(self.reduce(x), valid)))
        return made.unflatten(-1, (self.groups, self.taps))

    def start(self, context: Context, capacity: int) -> Recent:
        return Recent(
            torch.zeros(
                context.positions.shape[0], self.size - 1, self.width, dtype=self.dtype, device=context.positions.device
            )
        )

    def step(self, x: Tensor, state: Recent, context: Context) -> tuple[Tensor, Recent]:
        if not self.causal:
            raise UserError("an involution over both sides needs the whole sequence at once, so it does not step")
        padded = torch.cat((state.inputs, x), 1)  # (batch, size - 1 + time, width)
        newest = context.lengths[:, None] + torch.arange(
            self.size - 1, device=x.device
        )  # the last valid ones of each row
        recent = padded.gather(1, newest[..., None].expand(-1, -1, self.width))
        return self._convolve(padded, self.kernels(x, context.valid)), Recent(recent)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        kernels = self.kernels(x, context.valid)
        if context.valid is not None:
            x = x.masked_fill(~context.valid[..., None], 0.0)
        if self.columns is not None:
            image = F.pad(x, (0, 0, 0, -x.shape[1] % self.columns)).unflatten(1, (-1, self.columns))
            return apply_kernels(square_windows(image.permute(0, 3, 1, 2), self.size)[:, : x.shape[1]], kernels)
        before = self.size - 1 if self.causal else (self.size - 1) // 2
        return self._convolve(F.pad(x, (0, 0, before, self.size - 1 - before)), kernels)

    def _convolve(self, padded: Tensor, kernels: Tensor) -> Tensor:
        """Apply the kernels to `padded` (batch, size - 1 + time, width): (batch, time, width)."""
        return apply_kernels(padded.unfold(1, self.size, 1), kernels)

    def cost(self, length: int, past: int = 0) -> Cost:
        each = self.reduce.weight.numel() + self.span.weight.numel() + self.width * self.taps
        kept = (self.size - 1) * self.width * self.span.weight.element_size() if self.causal else 0
        return Cost(2 * length * each, kept)

    def growth(self) -> Growth:
        return Growth(f"{self.taps}·n·d + n·d²", "1", f"n/{self.size}")

    def value_path(self) -> Iterator[Tensor]:
        yield self.span.weight


def apply_kernels(windows: Tensor, kernels: Tensor) -> Tensor:
    """Weight the window of each position (batch, positions, channels, taps) by its kernels (batch, positions, groups,
    taps): (batch, positions, channels)."""
    return (windows.unflatten(2, (kernels.shape[2], -1)) @ kernels[..., None]).flatten(2)


def square_windows(image: Tensor, size: int, stride: int = 1) -> Tensor:
    """Return the pixels around each pixel, or around every `stride`-th, with zero padding: (batch, channels, height,
    width) -> (batch, positions, channels, size^2)."""
    windows = F.unfold(image, size, padding=(size - 1) // 2, stride=stride)  # (batch, channels * size^2, positions)
    return windows.unflatten(1, (image.shape[1], -1)).permute(0, 3, 1, 2)
