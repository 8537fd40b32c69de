"""Involution: a convolution turned inside out. A kernel belongs to a place, which makes it from its own vector, and is
shared by many channels; a convolution's belongs to a channel and is shared by all places.

    H_t   = W_span relu(norm(W_reduce x_t))                    a kernel for each group of channels
    y_t,c = sum over k of  H_t,g(c),k  x_(t+k),c               the last `size` positions, or as many around t

Li et al. 2021, "Involution: Inverting the Inherence of Convolution for Visual Recognition", arXiv:2103.06255. There a
place is a pixel and a kernel a square of size^2; here that is `columns`, and a line of positions is the default.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Context, Cost, Growth, Mixer, Norm, UserError, part


class Recent(NamedTuple):
    """What a kernel may still reach."""

    inputs: Tensor  # (batch, size - 1, width), the oldest first, zeros before the beginning


class Involution(Mixer[Recent]):
    """Kernels made where they are used.

    size:      positions that a kernel covers, or the side of its square.
    group:     channels that share a kernel.
    reduction: the width goes down by this factor between the two maps that make kernels.
    norm:      between those. The paper has batch norm, which looks ahead while it trains.
    causal:    look back only; else to both sides, and the whole sequence is needed at once.
    columns:   the sequence is an image with rows of so many pixels, read row by row, and kernels are squares around a
               pixel; None: it is a line.
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
                "kernels on an image of columns (at least 1) look to all sides: say causal = false, and an odd size"
            )
        self.width, self.size, self.group, self.causal, self.columns = width, size, group, causal, columns
        self.groups, self.taps = width // group, size if columns is None else size**2
        self.norm = part(Norm, norm, width=width // reduction)
        plain = not any(True for _ in self.norm.parameters())  # then nothing else moves the relu
        self.reduce = nn.Linear(width, width // reduction, bias=plain)
        self.span = nn.Linear(width // reduction, self.groups * self.taps)

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return self.causal

    def kernels(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """x (batch, time, width) -> (batch, time, groups, taps)"""
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
            raise UserError("an involution to both sides needs the whole sequence at once, so it does not step")
        reach = torch.cat((state.inputs, x), 1)  # (batch, size - 1 + time, width)
        newest = context.lengths[:, None] + torch.arange(self.size - 1, device=x.device)  # the last real ones of a row
        recent = reach.gather(1, newest[..., None].expand(-1, -1, self.width))
        return self._line(reach, self.kernels(x, context.valid)), Recent(recent)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        kernels = self.kernels(x, context.valid)
        if context.valid is not None:
            x = x.masked_fill(~context.valid[..., None], 0.0)
        if self.columns is not None:
            image = F.pad(x, (0, 0, 0, -x.shape[1] % self.columns)).unflatten(1, (-1, self.columns))
            return involve(squares(image.permute(0, 3, 1, 2), self.size)[:, : x.shape[1]], kernels)
        before = self.size - 1 if self.causal else (self.size - 1) // 2
        return self._line(F.pad(x, (0, 0, before, self.size - 1 - before)), kernels)

    def _line(self, reach: Tensor, kernels: Tensor) -> Tensor:
        """reach (batch, size - 1 + time, width) -> (batch, time, width)"""
        return involve(reach.unfold(1, self.size, 1), kernels)

    def cost(self, length: int, past: int = 0) -> Cost:
        each = self.reduce.weight.numel() + self.span.weight.numel() + self.width * self.taps
        kept = (self.size - 1) * self.width * self.span.weight.element_size() if self.causal else 0
        return Cost(2 * length * each, kept)

    def growth(self) -> Growth:
        return Growth(f"{self.taps}·n·d + n·d²", "1", f"n/{self.size}")

    def value_path(self) -> Iterator[Tensor]:
        yield self.span.weight


def involve(seen: Tensor, kernels: Tensor) -> Tensor:
    """What each place sees (batch, places, channels, taps), weighed by its kernels (batch, places, groups, taps) ->
    (batch, places, channels)."""
    return (seen.unflatten(2, (kernels.shape[2], -1)) @ kernels[..., None]).flatten(2)


def squares(image: Tensor, size: int, stride: int = 1) -> Tensor:
    """The pixels around each pixel, or around every `stride`-th: (batch, channels, height, width) ->
    (batch, places, channels, size^2), zeros beyond the edges."""
    seen = F.unfold(image, size, padding=(size - 1) // 2, stride=stride)  # (batch, channels * size^2, places)
    return seen.unflatten(1, (image.shape[1], -1)).permute(0, 3, 1, 2)
