"""Graph attention: a node takes a weighted mean of its neighbors, with weights that depend on both nodes.

    score_ij = leaky(a . W x_i + b . W x_j)                    in each head, where i attends to j
    y_i      = act( sum over neighbors j of  softmax_j(score_ij)  W x_j )

The score is a sum of one term per node, so that all nodes rank their neighbors alike: see gatv2.
Veličković et al. 2018, "Graph Attention Networks", arXiv:1710.10903.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.bases.edges import GraphAttention, GraphEdges
from regard.core import Cost, Pattern, UserError


class Gat(GraphAttention):
    """dim:     channels of a head; None: width / heads.
    pattern:    which nodes each node may attend to; a batch adds its graph to it.
    join:       the outputs of the heads are concatenated ("concat") or averaged ("mean").
    slope:      negative slope of the leaky relu.
    loops:      every node also attends to itself.
    project:    W is a learned projection; False: the identity, where the embed has projected the input already.
    activation: activation of the output: elu, identity, ...
    bias:       a bias is added to the joined heads.
    """

    examples = (
        {},
        {"dim": 5, "join": "mean", "pattern": "window(2)", "loops": False, "activation": "identity"},
        {"dim": 5, "slope": 0.1, "pattern": "stride(3)", "bias": False},
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
        self.into = nn.Linear(width, heads * self.dim, bias=False) if project else nn.Identity()
        self.score = nn.Parameter(torch.empty(heads, self.dim, 2))  # one vector for the query, one for the key
        if isinstance(self.into, nn.Linear):
            nn.init.xavier_uniform_(self.into.weight)
        nn.init.uniform_(self.score, -1, 1).data.mul_(
            (6 / (self.dim + 1)) ** 0.5
        )  # Glorot initialization of each vector

    def look(self, x: Tensor, graph: GraphEdges) -> tuple[Tensor, Tensor]:
        values = self.into(x).unflatten(-1, (self.heads, self.dim))
        query, key = torch.einsum("nhd,hdc->cnh", values, self.score)
        both = query.index_select(0, graph.query) + key.index_select(0, graph.key)
        return F.leaky_relu(both, self.slope), values

    def cost(self, length: int, past: int = 0) -> Cost:
        """Count matrix products only: the aggregation over edges is none."""
        weights = sum(weight.numel() for weight in (*self.into.parameters(), self.score))
        return Cost(2 * length * weights, 0)
