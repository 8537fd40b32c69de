"""Bahdanau attention: before every step, a GRU decoder attends to the source and reads the result with its input.

    a_t = softmax_j(v . tanh(W s_(t-1) + U m_j + b))        over the encoder's memory m
    c_t = sum_j a_tj m_j
    s_t = GRU([x_t; c_t], s_(t-1)),      s_0 = tanh(W_0 [last forward; last backward state of the encoder])
    y_t = [s_t; c_t; x_t]

Bahdanau et al. 2015, "Neural Machine Translation by Jointly Learning to Align and Translate", arXiv:1409.0473.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.bases.recurrent import (
    Cells,
    MemoryAttention,
    MemoryKeys,
    RecurrentState,
    keep_column,
    last_states,
    watch_after,
)
from regard.core import Context, Cost, Growth, Mixer, Place, Score, Tap, UserError


class Aligned(NamedTuple):
    """The GRU's state, and the source."""

    hidden: Tensor  # (batch, hidden)
    source: MemoryKeys


class Bahdanau(Mixer[Aligned]):
    """A GRU decoder with attention, which computes one position after the other.

    hidden:  channels of the state; None: the width.
    score:   how the score of a state and a memory position is computed.
    readout: channels of a maxout layer over [s; c; x], as in the paper; 0: the output is [s; c; x] itself.

    The initial state comes from the final states of the encoder's last recurrent mixer, or from the mean of the memory
    if the encoder is not recurrent. The tap `weights` sees (batch, 1, time, source).
    """

    examples = ({}, {"hidden": 7, "readout": 10}, {"score": {"part": "additive", "hidden": 5}})

    def __init__(
        self,
        width: int,
        hidden: int | None = None,
        score: Score | str | dict = "additive",
        readout: int = 0,
        place: Place | None = None,
    ):
        super().__init__()
        if readout < 0:
            raise UserError(f"readout must be a number of channels, or 0 for none, not {readout}")
        self.width, self.hidden = width, width if hidden is None else hidden
        self.memory_width = place.memory if place and place.memory else width
        self.cells = Cells("gru", width + self.memory_width, self.hidden)
        self.look = MemoryAttention(score, self.hidden, self.memory_width)
        self.first = nn.Linear(self.memory_width, self.hidden)
        self.features = self.hidden + self.memory_width + width
        self.readout = nn.Linear(self.features, 2 * readout) if readout else None
        self.weights = Tap()

    @property
    def out_width(self) -> int:
        return self.readout.out_features // 2 if self.readout else self.features

    def start(self, context: Context, capacity: int) -> Aligned:
        source = self.look.source(context, "bahdanau")
        final_states = last_states(context)
        if final_states:
            end = final_states[-1].hidden[:, -1]
            if end.shape[1] != self.memory_width:
                raise UserError(
                    f"the encoder's last state has width {end.shape[1]} and its output {self.memory_width}; bahdanau "
                    "starts from the last state and needs them equal: make the recurrent mixer the last of the encoder"
                )
        else:
            valid = (source.at >= 0).to(source.values.dtype)  # (batch, source)
            end = (valid[:, None] @ source.values)[:, 0] / valid.sum(1, keepdim=True).clamp(min=1)
        return Aligned(torch.tanh(self.first(end)), source)

    def step(self, x: Tensor, state: Aligned, context: Context) -> tuple[Tensor, Aligned]:
        source = state.source

        def run(given: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            hidden, outputs, all_weights = state.hidden, [], []
            for t in range(x.shape[1]):
                now = x[:, t : t + 1]
                weights = self.look.weigh(hidden[:, None], source) if given is None else given[:, :, t : t + 1]
                attended = self.look.read(weights, source)  # (batch, 1, memory)
                y, _ = self.cells(torch.cat((now, attended), -1), RecurrentState(hidden[:, None], None))
                hidden = keep_column(context, t, y[:, 0], hidden)
                outputs.append(torch.cat((y, attended, now), -1))
                all_weights.append(weights)
            return torch.cat(outputs, 1), hidden, torch.cat(all_weights, 2)

        y, hidden = watch_after(self.weights, run)
        if self.readout is not None:
            y = self.readout(y).unflatten(-1, (-1, 2)).amax(-1)
        return y, Aligned(hidden, source)

    def cost(self, length: int, past: int = 0) -> Cost:
        """Count the cost with a memory as long as the sequence."""
        size, source = self.first.weight.element_size(), past + length
        flops = self.cells.flops(length) + self.look.flops(length, source)
        flops += 2 * length * self.readout.weight.numel() if self.readout else 0
        return Cost(flops, self.cells.state() + self.look.state(source, size))

    def growth(self) -> Growth:
        return Growth("n·d² + n²·d", "n", "n")
