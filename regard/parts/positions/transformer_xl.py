"""Transformer-XL's positions: the score has a part for what a key holds and a part for how far away it is, each asked
by the query and by a standing preference.

    score = (q + u) . k  +  (q + v) . W r_(i-j)            r_d = sin(d w), cos(d w), the sinusoids of the original

Dai et al. 2019, arXiv:1901.02860. Both parts have the score's own scale. XLNet uses it in both directions.
"""

import torch
from torch import Tensor, nn

from regard.core import Place, Position, UserError
from regard.ops.dispatch import has_own_hooks
from regard.ops.rotary import angles, frequencies


class TransformerXL(Position):
    """base:       of the sinusoids' speeds.
    clip:          distances beyond are as this one; None: none are.
    bidirectional: keys ahead have distances of their own; False saves half of the work where none is ever seen.
    share:         "layers": u and v are the same in all layers of a stack, as in the authors' code; "none".
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
        known = place.shared if place is not None and share == "layers" else {}
        self.u, self.v = (known.setdefault((type(self), name, heads, dim), _leaning(heads, dim)) for name in "uv")
        self.of_place = nn.Linear(width, heads * dim, bias=False)
        nn.init.xavier_uniform_(self.of_place.weight)

    def query(self, q: Tensor, at: Tensor) -> Tensor:
        return q + self.u[:, None]

    def bias_query(self, q: Tensor) -> Tensor:
        return q + self.v[:, None]

    def bias(self, query_at: Tensor, key_at: Tensor, q: Tensor) -> Tensor:
        """Each query meets every distance once; a key then picks its own."""
        far = query_at - key_at.clamp(min=0)  # (batch or 1, 1, n, m)
        if self.clip is not None or not self.bidirectional:
            far = far.clamp(-(self.clip or 0) if self.bidirectional else 0, self.clip)
        low, high = self._ends(far)
        angle = angles(torch.arange(low, high + 1, device=q.device), self.rates)
        places = torch.cat((angle.sin(), angle.cos()), -1).to(q.dtype)  # (distances, width)
        many = self._work(q.shape[0] * q.shape[2], places.shape[0])[0]
        if many or has_own_hooks(self.of_place):
            each = q @ self.of_place(places).unflatten(-1, (self.heads, self.dim)).permute(1, 2, 0)
        else:
            each = q @ self.of_place.weight.unflatten(0, (self.heads, self.dim)) @ places.mT
        return torch.gather(each, -1, (far - low).expand(*each.shape[:-1], -1))

    def _ends(self, far: Tensor) -> tuple[int, int]:
        """The smallest and the largest distance. While torch is exporting, what these can be at most."""
        if not torch.compiler.is_exporting():
            low, high = far.aminmax()
            return int(low), int(high)
        if self.clip is not None:
            return -self.clip if self.bidirectional else 0, self.clip
        return 1 - far.shape[-2] if self.bidirectional else 0, far.shape[-1] - 1

    def _work(self, queries: int, places: int) -> tuple[bool, int]:
        """Whether to map the places, as many queries deserve, and not the few queries; multiply-adds of the better."""
        inner = self.heads * self.dim
        of_places = places * self.width * inner + queries * places * inner
        of_queries = queries * inner * self.width + queries * places * self.heads * self.width
        return of_places <= of_queries, min(of_places, of_queries)

    def flops(self, queries: int, keys: int, pairs: float) -> int:
        low, high = -(queries - 1) if self.bidirectional else 0, keys - 1
        if self.clip is not None:
            low, high = max(low, -self.clip), min(high, self.clip)
        return 2 * self._work(queries, high - low + 1)[1]


def _leaning(heads: int, dim: int) -> nn.Parameter:
    """A standing preference."""
    return nn.Parameter(torch.empty(heads, dim).normal_(std=0.02))
