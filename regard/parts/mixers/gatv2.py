"""GATv2: graph attention in which every node may rank its neighbors differently.

    score_ij = a . leaky(W x_i + U x_j)                        in each head, where i attends to j
    y_i      = act( sum over neighbors j of  softmax_j(score_ij)  U x_j )

In gat the activation comes after the vector a, and the score is a sum of a term of i and one of j.
Brody et al. 2022, "How Attentive are Graph Attention Networks?", arXiv:2105.14491.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.bases.edges import GraphAttention, GraphEdges
from regard.core import Cost, Pattern, UserError


class Gatv2(GraphAttention):
    """dim:     channels of a head; None: width / heads.
    pattern:    which nodes each node may attend to; a batch adds its graph to it.
    join:       the outputs of the heads are concatenated ("concat") or averaged ("mean").
    slope:      negative slope of the leaky relu.
    loops:      every node also attends to itself.
    share:      W and U are one projection.
    project:    False: both are the identity, where the embed has projected the input already.
    activation: activation of the output: elu, identity, ...
    bias:       the projections and the joined heads have a bias.
    """

    examples = (
        {},
        {"dim": 5, "join": "mean", "pattern": "window(2)", "loops": False, "activation": "identity"},
        {"dim": 5, "slope": 0.1, "pattern": "stride(3)", "bias": False, "share": True},
        {"project": False},
    )

    def __init__(
        self,
        width: int,
        heads: int,
        dim: int | None = None,
        pattern: Pattern | str = "everything",
        join: str = "concat",
        slope: float = 0.2,
        loops: bool = True,
        share: bool = False,
        project: bool = True,
        activation: str = "elu",
        bias: bool = True,
        weight_dropout: float = 0.0,
    ):
        super().__init__(width, heads, dim, pattern, join, loops, activation, bias, weight_dropout)
        self.slope = slope
        if not project and width != heads * self.dim:
            raise UserError(
                f"there is no projection from width {width} to {heads} heads of {self.dim}: set project = true"
            )
        self.of_key = nn.Linear(width, heads * self.dim, bias=bias) if project else nn.Identity()
        one = share or not project
        self.of_query = self.of_key if one else nn.Linear(width, heads * self.dim, bias=bias)
        self.score = nn.Parameter(torch.empty(heads, self.dim))
        for linear in (self.of_key, self.of_query):
            if isinstance(linear, nn.Linear):
                nn.init.xavier_uniform_(linear.weight)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
        nn.init.uniform_(self.score, -1, 1).data.mul_(
            (6 / (self.dim + 1)) ** 0.5
        )  # Glorot initialization of each vector

    def look(self, x: Tensor, graph: GraphEdges) -> tuple[Tensor, Tensor]:
        keys = self.of_key(x).unflatten(-1, (self.heads, self.dim))
        queries = keys if self.of_query is self.of_key else self.of_query(x).unflatten(-1, (self.heads, self.dim))
        pairs = queries.index_select(0, graph.query) + keys.index_select(0, graph.key)  # (edges, heads, dim)
        return (F.leaky_relu(pairs, self.slope) * self.score).sum(-1), keys

    def cost(self, length: int, past: int = 0) -> Cost:
        """Count matrix products only: the aggregation over edges is none."""
        maps = {linear for linear in (self.of_key, self.of_query) if isinstance(linear, nn.Linear)}
        return Cost(2 * length * sum(linear.weight.numel() for linear in maps), 0)
