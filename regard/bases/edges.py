"""Attention over the edges of a graph: time and memory grow with the edges, not with all pairs of nodes.

weights_e = exp(score_e) / sum of exp(score) over the edges of the same query
y_i       = sum over the edges e of query i of  weights_e value_(key of e)
"""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.core import Context, Dropout, Empty, Growth, Mixer, Pattern, Tap, UserError, part
from regard.ops.activation import activation as activate

JOINS = ("concat", "mean")


class GraphEdges(NamedTuple):
    """The edges of a batch; node i of row r has the number r * time + i."""

    query: Tensor  # (edges,) node numbers
    key: Tensor  # (edges,) node numbers
    nodes: int


def graph(pattern: Pattern, context: Context, loops: bool) -> GraphEdges:
    """Return the edges of a batch of whole sequences, from a pattern and the batch's own. loops: every real node also
    attends to itself, after its other edges."""
    batch, time = context.positions.shape
    both = pattern if context.pattern is None else pattern & context.pattern
    if both.rows not in (1, batch):
        raise UserError(f"pattern '{both}' is for {both.rows} sequences, and the batch has {batch}")
    if both.heads > 1:
        raise UserError(f"pattern '{both}' is another one for each head, and in a graph all heads have the same edges")
    device = context.positions.device
    row, query, key = (_cached_edges(both, time) if both.fixed else both.edges(time)).to(device)
    if loops:
        other = query != key
        at = torch.arange(time, device=device).repeat(both.rows)
        own = torch.arange(both.rows, device=device).repeat_interleave(time)
        row, query, key = (torch.cat((a[other], b)) for a, b in ((row, own), (query, at), (key, at)))
    if both.rows == 1 and batch > 1:
        row = torch.arange(batch, device=device).repeat_interleave(len(query))
        query, key = query.repeat(batch), key.repeat(batch)
    query, key = row * time + query, row * time + key
    if context.valid is not None:
        real = context.valid.flatten()
        seen = real[query] & real[key]
        query, key = query[seen], key[seen]
    return GraphEdges(query, key, batch * time)


@lru_cache(maxsize=16)
def _cached_edges(pattern: Pattern, length: int) -> Tensor:
    return pattern.edges(length)


def softmax(scores: Tensor, graph: GraphEdges) -> Tensor:
    """scores (edges, heads) -> the same shape; the edges of a query sum to 1."""
    index = graph.query[:, None].expand_as(scores)
    most = scores.new_zeros(graph.nodes, scores.shape[1]).scatter_reduce(
        0, index, scores.detach(), "amax", include_self=False
    )
    likely = (scores - most.index_select(0, graph.query)).exp()
    total = torch.zeros_like(most).index_add(0, graph.query, likely)
    return likely / total.index_select(0, graph.query)


def weighted_sum(weights: Tensor, values: Tensor, graph: GraphEdges) -> Tensor:
    """weights (edges, heads), values (nodes, heads, dim) -> (nodes, heads, dim), zeros for nodes without edges."""
    seen = values.index_select(0, graph.key) * weights[..., None]
    return torch.zeros_like(values).index_add(0, graph.query, seen)


class GraphAttention(Mixer[Empty]):
    """The base of graph attentions: everything but the projections and the score.

    width, heads, dim: None: width / heads.
    pattern:    the allowed pairs; a batch restricts them by its graph.
    join:       the heads' outputs side by side ("concat"), or their "mean".
    loops:      every node also attends to itself.
    activation: of the output.
    bias:       added to the joined heads.
    """

    streams = False

    def __init__(
        self,
        width: int,
        heads: int,
        dim: int | None,
        pattern: Pattern | str,
        join: str,
        loops: bool,
        activation: str,
        bias: bool,
        weight_dropout: float,
    ):
        super().__init__()
        if dim is None and width % heads:
            raise UserError(f"width {width} is not divisible by {heads} heads: change one, or give dim")
        if join not in JOINS:
            raise UserError(f"join must be 'concat' or 'mean', not '{join}'")
        self.width, self.heads, self.dim, self.join, self.loops = width, heads, dim or width // heads, join, loops
        self.pattern = part(Pattern, pattern)
        self.bias = nn.Parameter(torch.empty(self.out_width)) if bias else None
        self.activate = activate(activation)
        self.drop = Dropout(weight_dropout)
        self.weights = Tap()
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def out_width(self) -> int:
        return self.dim * self.heads if self.join == "concat" else self.dim

    @abstractmethod
    def look(self, x: Tensor, graph: GraphEdges) -> tuple[Tensor, Tensor]:
        """x (nodes, width) -> scores (edges, heads) and values (nodes, heads, dim)."""

    def start(self, context: Context, capacity: int) -> Empty:
        return Empty()

    def step(self, x: Tensor, state: Empty, context: Context) -> tuple[Tensor, Empty]:
        raise UserError("a graph needs all nodes at once, so graph attention does not step")

    def forward(self, x: Tensor, context: Context) -> Tensor:
        edges = graph(self.pattern, context, self.loops)
        scores, values = self.look(x.flatten(0, 1), edges)
        weights = self.weights(softmax(scores, edges))  # (edges, heads)
        y = weighted_sum(self.drop(weights), values, edges)
        y = (y.flatten(1) if self.join == "concat" else y.mean(1)).unflatten(0, x.shape[:2])
        return self.activate(y if self.bias is None else y + self.bias)

    def growth(self) -> Growth:
        return Growth("n·d² + edges·d", "1", "diameter")
