"""A graph as a list of edges: each edge allows one query to attend to one key. For graphs with a sparse adjacency
matrix.

    (query, key)  in  the list

Veličković et al. 2018, "Graph Attention Networks", arXiv:1710.10903.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.core import Pattern, UserError

MAX_NODES = 1 << 31  # so that a pair of nodes fits into 64 bits


@dataclass(frozen=True, eq=False)
class Edges(Pattern):
    """pairs: (2, edges) integers: the queries, and the key that each attends to. Duplicate edges count once. An
    undirected edge is listed as two edges.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"pairs": torch.tensor([[0, 1, 1, 5, 5, 7, 30, 12, 1], [0, 0, 1, 9, 2, 7, 4, 35, 0]])},
        {"pairs": torch.tensor([[1, 2, 2, 33, 39], [0, 0, 1, 5, 39]])},
    )
    pairs: Tensor

    def __post_init__(self) -> None:
        given = self.pairs
        if not isinstance(given, Tensor) or given.dim() != 2 or len(given) != 2 or not given.shape[1]:
            raise UserError("the edges of a graph are a tensor (2, edges): the queries, and the key of each")
        if given.is_floating_point() or int(given.min()) < 0 or int(given.max()) >= MAX_NODES:
            raise UserError("the edges of a graph are integer node indices, counted from 0")

    @cached_property
    def _list(self) -> Tensor:
        """Return the edges (2, edges), sorted and without duplicates, as a copy that callers cannot change."""
        codes = torch.unique(self.pairs[0].cpu().long() * MAX_NODES + self.pairs[1].cpu().long())
        return torch.stack((codes // MAX_NODES, codes % MAX_NODES))

    @cached_property
    def causal(self) -> bool:  # type: ignore[override]
        return bool((self._list[1] <= self._list[0]).all())

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        queries, keys = self._list.to(key_at.device)
        asked = torch.where((query_at >= 0) & (key_at >= 0), query_at.long() * MAX_NODES + key_at.long(), -1)
        edges = queries * MAX_NODES + keys  # sorted
        place = torch.searchsorted(edges, asked.contiguous()).clamp(max=len(edges) - 1)
        return edges[place] == asked

    def edges(self, length: int) -> Tensor:
        inside = self._list[:, (self._list < length).all(0)]
        return torch.cat((torch.zeros_like(inside[:1]), inside))
