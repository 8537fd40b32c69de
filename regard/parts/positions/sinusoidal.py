"""Sinusoidal positions: every place has its own mixture of slow and fast waves, added to the token vectors.

    p(n, 2i) = sin(n / 10000^(2i/d))      p(n, 2i+1) = cos(n / 10000^(2i/d))

Vaswani et al. 2017, arXiv:1706.03762.
"""

import torch
from torch import Tensor

from regard.core import Position, UserError
from regard.core.position import angles


class Sinusoidal(Position):
    """Fixed, unlimited in length.

    layout: "interleaved": sin and cos take turns, as in the paper; "halves": all sines, then all cosines.
    offset: added to every position; fairseq counts from 2.
    spread: exponents i/(d/2) as in the paper, or "ends": i/(d/2 - 1), which reaches the base exactly (tensor2tensor,
            Whisper).
    """

    examples = ({}, {"layout": "halves", "offset": 2, "spread": "ends"})

    def __init__(
        self, width: int, layout: str = "interleaved", base: float = 10000.0, offset: int = 0, spread: str = "paper"
    ):
        super().__init__()
        if layout not in ("interleaved", "halves"):
            raise UserError(f"layout must be 'interleaved' or 'halves', not '{layout}'")
        if spread not in ("paper", "ends"):
            raise UserError(f"spread must be 'paper' or 'ends', not '{spread}'")
        if width % 2:
            raise UserError(f"sinusoidal positions need an even width, not {width}")
        self.layout, self.offset = layout, offset
        half = width // 2
        self.rates = tuple(base ** (-i / (half if spread == "paper" else max(half - 1, 1))) for i in range(half))

    def table(self, at: Tensor) -> Tensor:
        """(..., width) for positions (...)."""
        turned = angles(at + self.offset, self.rates)
        if self.layout == "halves":
            return torch.cat((turned.sin(), turned.cos()), -1)
        return torch.stack((turned.sin(), turned.cos()), -1).flatten(-2)

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        return x + self.table(at).to(x.dtype)
