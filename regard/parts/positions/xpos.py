"""Extrapolatable positions: rotary ones whose fast waves also fade with distance, so that far keys are seen in outline.

    q_i at n  ->  s_i^(n / scale_base) turned by n w_i       k_i at m  ->  s_i^(-m / scale_base) turned by m w_i
    w_i = base^(-2i/dim)       s_i = (2i/dim + gamma) / (1 + gamma)       product: s_i^((n - m) / scale_base), turned

Sun et al. 2022, "A Length-Extrapolatable Transformer", arXiv:2212.10554.
"""

import math

from torch import Tensor

from regard.core import Position, UserError
from regard.ops.rotary import angles, frequencies, rotate

ROOM = 60.0  # factors stay within e^-60 ... e^60, which leaves single precision twelve digits for what they multiply


class Xpos(Position):
    """Neighbouring channels turn together. For causal patterns: keys ahead would grow instead of fading.

    scale_base: places over which a wave fades by its s.
    gamma:      how much even the fastest wave keeps.
    centre:     the place where the factors are 1. Products do not depend on it, but the range of floats does: a key
                grows with its place as fast as a query shrinks, which single precision and bfloat16 bear for about 48
                scale_bases to either side, so half of the longest sequence is best. It is fixed and not, as in the
                original, half of the sequence at hand, since cached keys keep the factor that they were given.
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
        self.fades = tuple(math.log((2 * i / dim + gamma) / (1 + gamma)) / scale_base for i in range(dim // 2))
        reach = int(-ROOM / self.fades[0])
        if not 0 <= centre <= reach:
            raise UserError(
                f"centre must be from 0 to {reach}, as far as floats reach with this scale_base, not {centre}"
            )
        self.limit = centre + reach

    def query(self, q: Tensor, at: Tensor) -> Tensor:
        return self._turn(q, at, 1)

    def key(self, k: Tensor, at: Tensor) -> Tensor:
        return self._turn(k, at, -1)

    def _turn(self, x: Tensor, at: Tensor, sign: int) -> Tensor:
        angle = angles(at, self.rates)[:, None]  # (batch or 1, 1, time, pairs)
        factor = (sign * angles(at - self.centre, self.fades)[:, None]).exp()
        return rotate(x, (angle.cos() * factor).to(x.dtype), (angle.sin() * factor).to(x.dtype), "interleaved")
