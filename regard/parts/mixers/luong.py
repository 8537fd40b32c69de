"""Luong attention: a recurrent decoder attends to the source from its new state, and the result is fed back (input
feeding).

    h_t = LSTM([x_t; y_(t-1)], h_(t-1))                     y_(t-1) only with input feeding
    a_t = softmax_j(score(h_t, m_j)),     c_t = sum_j a_tj m_j      over the encoder's memory m
    y_t = tanh(W [c_t; h_t])                                the attentional vector

Luong et al. 2015, "Effective Approaches to Attention-based Neural Machine Translation", arXiv:1508.04025.
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
    check_begin,
    keep_column,
    watch_after,
)
from regard.core import Context, Cost, Growth, Mixer, Place, Score, Tap
from regard.ops.activation import activation as activate


class LuongState(NamedTuple):
    """The state of the cells, the vector that is fed back, and the source."""

    last: RecurrentState
    fed: Tensor | None  # (batch, hidden) the previous attentional vector, None without input feeding
    source: MemoryKeys


class Attentional(nn.Module):
    """Returns the attentional vectors (batch, n, hidden) of h (batch, n, hidden), and the weights (batch, 1, n,
    source).

    activation: activation of the vector; "identity" for none.
    bias:       W has a bias.
    """

    def __init__(
        self, hidden: int, memory: int, score: Score | str | dict, activation: str = "tanh", bias: bool = False
    ):
        super().__init__()
        self.look = MemoryAttention(score, hidden, memory)
        self.out = nn.Linear(memory + hidden, hidden, bias=bias)
        self.activate = activate(activation)

    def forward(self, h: Tensor, source: MemoryKeys, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
        weights = self.look.weigh(h, source) if given is None else given
        return self.activate(self.out(torch.cat((self.look.read(weights, source), h), -1))), weights


class Luong(Mixer[LuongState]):
    """A recurrent decoder with attention. Without input feeding all positions of a step attend at once.

    hidden:     channels of a state and of the output; None: the width.
    cell:       lstm or gru.
    layers:     number of stacked layers; the last one attends.
    score:      dot, general, additive (concat), ...
    feed:       input feeding.
    activation: activation of the attentional vector.
    bias:       the projection to the attentional vector has a bias.
    begin:      initial state: "memory": the final states of the encoder's recurrent mixers, if it has any; or "zeros".
    dropout:    dropout between the layers.

    The tap `weights` sees (batch, 1, time, source).
    """

    examples = (
        {},
        {"score": "dot", "cell": "gru", "hidden": 7, "layers": 2},
        {"score": "additive", "feed": False, "activation": "identity", "bias": True},
    )

    def __init__(
        self,
        width: int,
        hidden: int | None = None,
        cell: str = "lstm",
        layers: int = 1,
        score: Score | str | dict = "general",
        feed: bool = True,
        activation: str = "tanh",
        bias: bool = False,
        begin: str = "memory",
        dropout: float = 0.0,
        place: Place | None = None,
    ):
        super().__init__()
        self.width, self.hidden, self.feed = width, width if hidden is None else hidden, feed
        self.initial = check_begin(begin)
        self.memory_width = place.memory if place and place.memory else width
        self.cells = Cells(cell, width + (self.hidden if feed else 0), self.hidden, layers, dropout=dropout)
        self.attentional = Attentional(self.hidden, self.memory_width, score, activation, bias)
        self.weights = Tap()

    @property
    def out_width(self) -> int:
        return self.hidden

    def start(self, context: Context, capacity: int) -> LuongState:
        last = self.cells.begin(context, self.initial)
        fed = torch.zeros_like(last.hidden[:, 0]) if self.feed else None
        return LuongState(last, fed, self.attentional.look.source(context, "luong"))

    def step(self, x: Tensor, state: LuongState, context: Context) -> tuple[Tensor, LuongState]:
        def run(given: Tensor | None) -> tuple[Tensor, LuongState, Tensor]:
            if state.fed is not None:
                return self._feed(x, state, state.fed, context, given)
            h, last = self.cells(x, state.last, context)
            y, weights = self.attentional(h, state.source, given)
            return y, LuongState(last, None, state.source), weights

        return watch_after(self.weights, run)

    def _feed(
        self, x: Tensor, state: LuongState, fed: Tensor, context: Context, given: Tensor | None
    ) -> tuple[Tensor, LuongState, Tensor]:
        """Compute one position after the other, with input feeding."""
        last, outputs, all_weights = state.last, [], []
        for t in range(x.shape[1]):
            h, new = self.cells(torch.cat((x[:, t : t + 1], fed[:, None]), -1), last)
            y, weights = self.attentional(h, state.source, None if given is None else given[:, :, t : t + 1])
            fed = keep_column(context, t, y[:, 0], fed)
            cell = None if new.cell is None or last.cell is None else keep_column(context, t, new.cell, last.cell)
            last = RecurrentState(keep_column(context, t, new.hidden, last.hidden), cell)
            outputs.append(y)
            all_weights.append(weights)
        return torch.cat(outputs, 1), LuongState(last, fed, state.source), torch.cat(all_weights, 2)

    def cost(self, length: int, past: int = 0) -> Cost:
        """Count the cost with a memory as long as the sequence."""
        out, source = self.attentional.out.weight, past + length
        flops = self.cells.flops(length) + self.attentional.look.flops(length, source) + 2 * length * out.numel()
        fed = self.hidden * out.element_size() if self.feed else 0
        return Cost(flops, self.cells.state() + fed + self.attentional.look.state(source, out.element_size()))

    def growth(self) -> Growth:
        return Growth("n·d² + n²·d", "n", "n")
