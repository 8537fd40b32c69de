"""Extrapolatable positions (xPos): rotary positions whose high frequencies also decay with distance.

    q_i at n  ->  s_i^(n / scale_base) rotated by n w_i       k_i at m  ->  s_i^(-m / scale_base) rotated by m w_i
    w_i = base^(-2i/dim)       s_i = (2i/dim + gamma) / (1 + gamma)       product: s_i^((n - m) / scale_base), rotated

Sun et al. 2022, "A Length-Extrapolatable Transformer", arXiv:2212.10554.
"""

import math

from torch import Tensor

from regard.core import Position, UserError
from regard.ops.rotary import angles, frequencies, rotate

MAX_EXPONENT = 60.0  # factors stay within e^-60 ... e^60, so that products with them fit into float32


class Xpos(Position):
    """Neighboring channels are paired. For causal patterns only: scores of keys after the query would grow with
    distance.

    scale_base: number of positions over which a channel decays by its factor s.
    gamma:      how much even the highest frequency keeps.
    centre:     position at which the factors are 1. Dot products do not depend on it, but the range of floats does: a
                key grows with its position as a query shrinks, which float32 and bfloat16 can represent for about 48
                scale_bases to either side, so half of the maximum length is best. It is fixed and not, as in the
                original, half of the current length, since cached keys keep the factor that they were given.
    """

    relative = True
    examples = ({}, {"scale_base": 16, "centre": 11, "gamma": 0.3})

    def __init__(self, dim: int, base: float = 10000.0, scale_base: int = 512, gamma: float = 0.4, centre: int = 0):
        super().__init__()
        if dim % 2:
            raise UserError(f"xpos positions need an even number of channels in a head, not {dim}")
        if scale_base < 1 or gamma <= 0:
            raise UserError(f"xpos needs scale_base >= 1 and gamma > 0, not {scale_base} and {gamma}")
        self.rates, self.centre = frequencies(dim, base), centre
        self.decays = tuple(math.log((2 * i / dim + gamma) / (1 + gamma)) / scale_base for i in range(dim // 2))
        reach = int(-MAX_EXPONENT / self.decays[0])
        if not 0 <= centre <= reach:
            raise UserError(
                f"centre must be from 0 to {reach}, as far as floats reach with this scale_base, not {centre}"
            )
        self.limit = centre + reach

    def query(self, q: Tensor, at: Tensor) -> Tensor:
        return self._rotate(q, at, 1)

    def key(self, k: Tensor, at: Tensor) -> Tensor:
        return self._rotate(k, at, -1)

    def _rotate(self, x: Tensor, at: Tensor, sign: int) -> Tensor:
        angle = angles(at, self.rates)[:, None]  # (batch or 1, 1, time, pairs)
        factor = (sign * angles(at - self.centre, self.decays)[:, None]).exp()
        return rotate(x, (angle.cos() * factor).to(x.dtype), (angle.sin() * factor).to(x.dtype), "interleaved")
