"""A graph as a list of its edges: each says who looks at whom. For graphs whose matrix would be nearly empty.

    (query, key)  in  the list

Veličković et al. 2018, "Graph Attention Networks", arXiv:1710.10903.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.core import Pattern, UserError

MOST = 1 << 31  # nodes, so that a pair of them fits a number of 64 bits


@dataclass(frozen=True, eq=False)
class Edges(Pattern):
    """pairs: (2, edges) whole numbers: queries, and the key that each looks at. An edge counts once, however often it
    is listed. A street with two directions is two edges.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"pairs": torch.tensor([[0, 1, 1, 5, 5, 7, 30, 12, 1], [0, 0, 1, 9, 2, 7, 4, 35, 0]])},
        {"pairs": torch.tensor([[1, 2, 2, 33, 39], [0, 0, 1, 5, 39]])},
    )
    pairs: Tensor

    def __post_init__(self) -> None:
        given = self.pairs
        if not isinstance(given, Tensor) or given.dim() != 2 or len(given) != 2 or not given.shape[1]:
            raise UserError("the edges of a graph are a tensor (2, edges): queries, and the key that each looks at")
        if given.is_floating_point() or int(given.min()) < 0 or int(given.max()) >= MOST:
            raise UserError("the edges of a graph are whole numbers of nodes, counted from 0")

    @cached_property
    def _list(self) -> Tensor:
        """(2, edges), sorted and each once: a copy, so that nobody changes it from outside."""
        codes = torch.unique(self.pairs[0].cpu().long() * MOST + self.pairs[1].cpu().long())
        return torch.stack((codes // MOST, codes % MOST))

    @cached_property
    def causal(self) -> bool:  # type: ignore[override]
        return bool((self._list[1] <= self._list[0]).all())

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        queries, keys = self._list.to(key_at.device)
        asked = torch.where((query_at >= 0) & (key_at >= 0), query_at.long() * MOST + key_at.long(), -1)
        known = queries * MOST + keys  # sorted
        place = torch.searchsorted(known, asked.contiguous()).clamp(max=len(known) - 1)
        return known[place] == asked

    def edges(self, length: int) -> Tensor:
        inside = self._list[:, (self._list < length).all(0)]
        return torch.cat((torch.zeros_like(inside[:1]), inside))
