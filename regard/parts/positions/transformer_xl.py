"""Transformer-XL's relative positions: the score is the sum of a content term and a distance term, each with a learned
bias that is added to the query.

    score = (q + u) . k  +  (q + v) . W r_(i-j)            r_d = sin(d w), cos(d w), the sinusoids of the original

Dai et al. 2019, arXiv:1901.02860. Both terms have the scale of the score. XLNet uses it in both directions.
"""

import torch
from torch import Tensor, nn

from regard.core import Place, Position, UserError
from regard.ops.dispatch import has_own_hooks
from regard.ops.rotary import angles, frequencies


class TransformerXL(Position):
    """base:       base of the frequencies of the sinusoids.
    clip:          larger distances are clipped to this one; None: they are not.
    bidirectional: keys after the query have distances of their own; False halves the work of causal attention.
    share:         "layers": u and v are shared by all layers of a stack, as in the authors' code; "none": they are not.
    """

    relative = True
    needs_query = True
    examples = ({}, {"bidirectional": False}, {"clip": 5}, {"clip": 6, "bidirectional": False})

    def __init__(
        self,
        width: int,
        heads: int,
        dim: int,
        base: float = 10000.0,
        clip: int | None = None,
        bidirectional: bool = True,
        share: str = "none",
        place: Place | None = None,
    ):
        super().__init__()
        if width % 2:
            raise UserError(f"transformer_xl positions need an even width, not {width}")
        if clip is not None and clip < 1:
            raise UserError(f"clip must be at least 1, not {clip}")
        self.width, self.heads, self.dim, self.clip = width, heads, dim, clip
        self.bidirectional, self.rates = bidirectional, frequencies(width, base)
        if share not in ("none", "layers"):
            raise UserError(f"share must be 'none' or 'layers', not '{share}'")
        shared = place.shared if place is not None and share == "layers" else {}
        self.u, self.v = (shared.setdefault((type(self), name, heads, dim), _bias(heads, dim)) for name in "uv")
        self.of_place = nn.Linear(width, heads * dim, bias=False)
        nn.init.xavier_uniform_(self.of_place.weight)

    def query(self, q: Tensor, at: Tensor) -> Tensor:
        return q + self.u[:, None]

    def bias_query(self, q: Tensor) -> Tensor:
        return q + self.v[:, None]

    def bias(self, query_at: Tensor, key_at: Tensor, q: Tensor) -> Tensor:
        """Score each query against every distance once, then gather the distance of each key."""
        distance = query_at - key_at.clamp(min=0)  # (batch or 1, 1, n, m)
        if self.clip is not None or not self.bidirectional:
            distance = distance.clamp(-(self.clip or 0) if self.bidirectional else 0, self.clip)
        low, high = self._range(distance)
        angle = angles(torch.arange(low, high + 1, device=q.device), self.rates)
        vectors = torch.cat((angle.sin(), angle.cos()), -1).to(q.dtype)  # (distances, width)
        project_positions = self._work(q.shape[0] * q.shape[2], vectors.shape[0])[0]
        if project_positions or has_own_hooks(self.of_place):
            scores = q @ self.of_place(vectors).unflatten(-1, (self.heads, self.dim)).permute(1, 2, 0)
        else:
            scores = q @ self.of_place.weight.unflatten(0, (self.heads, self.dim)) @ vectors.mT
        return torch.gather(scores, -1, (distance - low).expand(*scores.shape[:-1], -1))

    def _range(self, distance: Tensor) -> tuple[int, int]:
        """Return the smallest and the largest distance; while torch is exporting, bounds of them."""
        if not torch.compiler.is_exporting():
            low, high = distance.aminmax()
            return int(low), int(high)
        if self.clip is not None:
            return -self.clip if self.bidirectional else 0, self.clip
        return 1 - distance.shape[-2] if self.bidirectional else 0, distance.shape[-1] - 1

    def _work(self, queries: int, distances: int) -> tuple[bool, int]:
        """Return whether projecting the position vectors is cheaper than projecting the queries, and the multiply-adds
        of the cheaper way."""
        inner = self.heads * self.dim
        of_positions = distances * self.width * inner + queries * distances * inner
        of_queries = queries * inner * self.width + queries * distances * self.heads * self.width
        return of_positions <= of_queries, min(of_positions, of_queries)

    def flops(self, queries: int, keys: int, pairs: float) -> int:
        low, high = -(queries - 1) if self.bidirectional else 0, keys - 1
        if self.clip is not None:
            low, high = max(low, -self.clip), min(high, self.clip)
        return 2 * self._work(queries, high - low + 1)[1]


def _bias(heads: int, dim: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(heads, dim).normal_(std=0.02))
