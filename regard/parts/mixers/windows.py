"""Layers that read a long source in overlapping windows. Each window is computed by itself, and only its middle is
kept, where there is context on both sides.

    windows begin at 0, s, 2s, ... and the last ends with the source;  s = size - 2 margin,  margin = size overlap / 2
    y_t = layers(the window around t)_t

Bertsch et al. 2023, "Unlimiformer", arXiv:2305.01625: an encoder of `size` positions reads a source of any length, in
linear time and memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regard.core import Context, Cost, Dropout, Empty, Growth, Mixer, Norm, Place, Position, Stack, UserError, part
from regard.schema import name_of


class Windows(Mixer[Empty]):
    """A stack of layers inside one mixer. Give its layer the wiring "plain".

    layer:    the inner layers, as in a stack.
    layers:   number of inner layers.
    size:     positions in a window.
    overlap:  overlap of neighboring windows, as a share of the size.
    position: position added to the input, counted from the start of each window.
    norm:     norm after that.
    last:     norm after the last layer.
    """

    streams = False
    restarts = True
    examples = (
        {"size": 6, "layer": {"mixer": {"part": "attention", "pattern": "everything"}}, "position": "sinusoidal"},
        {
            "size": 8,
            "overlap": 0.25,
            "layers": 2,
            "layer": [{"mixer": {"part": "attention", "pattern": "everything"}, "wiring": "post"}],
            "position": {"part": "learned", "length": 8},
            "norm": "layer",
            "last": "rms",
        },
        {"size": 64, "overlap": 0.0, "layer": {"feedforward": "mlp"}},
    )

    def __init__(
        self,
        width: int,
        layer: list | dict,
        size: int,
        layers: int = 1,
        overlap: float = 0.5,
        heads: int = 1,
        position: Position | str | dict = "none",
        norm: Norm | str | dict = "none",
        last: Norm | str | dict = "none",
        dropout: float = 0.0,
        place: Place | None = None,
    ):
        super().__init__()
        self.width, self.size, self.margin = width, size, int(size * overlap / 2)
        if size < 1 or not 0 <= overlap < 1 or size <= 2 * self.margin:
            raise UserError(
                f"windows need a size from 1 on, and an overlap from 0 to below 1, not {size} and {overlap}"
            )
        self.position = part(Position, position, width=width, heads=heads, dim=width // heads)
        if any(self.position.acts(where) for where in ("query", "key", "bias", "output_bias")):
            raise UserError(f"position '{name_of(self.position)}' acts in attention: name it there")
        if self.position.limit is not None and self.position.limit < size:
            raise UserError(f"position '{name_of(self.position)}' has {self.position.limit} positions, not {size}")
        self.norm, self.drop = part(Norm, norm, width=width), Dropout(dropout)
        inside = replace(place, encoder=layers) if place else None
        self.stack = Stack(width, layers, layer, heads, last, dropout=dropout, place=inside)
        if self.stack.width != width:
            raise UserError(f"layers in windows must keep the width of {width}")

    def start(self, context: Context, capacity: int) -> Empty:
        return Empty()

    def step(self, x: Tensor, state: Empty, context: Context) -> tuple[Tensor, Empty]:
        raise UserError("windows need the whole sequence at once, so they do not step")

    def forward(self, x: Tensor, context: Context) -> Tensor:
        batch, time = x.shape[:2]
        size, count = self._windows(time)
        stride = self.size - 2 * self.margin
        lengths = context.lengths[:, None]
        order = torch.arange(count, device=x.device)
        begin = torch.minimum(order * stride, (lengths - size).clamp(min=0))  # (batch, windows)
        at = begin[..., None] + torch.arange(size, device=x.device)  # (batch, windows, size)
        rows = torch.arange(batch, device=x.device)[:, None]
        cut = x[rows[..., None], at].flatten(0, 1)
        valid = None if context.valid is None else (at < lengths[..., None]).flatten(0, 1)
        inner = Context.begin(len(cut), size, x.device, valid=valid)
        cut = self.drop(self.norm(self.position.embed(cut, inner.positions[:1]), valid))
        y = self.stack(cut, inner).unflatten(0, (batch, count))
        where = torch.arange(time, device=x.device)
        last = -(-(lengths - size).clamp(min=0) // stride)  # (batch, 1), the last window of each row
        window = torch.minimum(((where - self.margin).clamp(min=0) // stride)[None], last)
        inside = (where - begin.gather(1, window)).clamp(max=size - 1)  # beyond the end there is only padding
        return y[rows, window, inside]

    def _windows(self, time: int) -> tuple[int, int]:
        """Return the length and the number of windows for a source of `time` positions."""
        stride = self.size - 2 * self.margin
        return min(self.size, time), 1 + -(-max(time - self.size, 0) // stride)

    def cost(self, length: int, past: int = 0) -> Cost:
        size, count = self._windows(past + length)
        return Cost(count * self.stack.cost(size).flops, 0)

    def growth(self) -> Growth:
        return Growth(f"n·{self.size}·d", "1", f"n/{self.size}")
