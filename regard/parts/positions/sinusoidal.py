"""Sinusoidal positions: every place has its own mixture of slow and fast waves, added to the token vectors.

    p(n, 2i) = sin(n / 10000^(2i/d))      p(n, 2i+1) = cos(n / 10000^(2i/d))

Vaswani et al. 2017, arXiv:1706.03762.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import Position, UserError
from regard.ops.rotary import angles


class Sinusoidal(Position):
    """Fixed, unlimited in length unless said otherwise.

    layout: "interleaved": sin and cos take turns, as in the paper; "halves": all sines, then all cosines.
    offset: added to every position; fairseq counts from 2.
    spread: exponents i/(d/2) as in the paper, or "ends": i/(d/2 - 1), which reaches the base exactly (tensor2tensor,
            Whisper).
    length: places that it knows; a longer sequence is refused. None: there is no end.
    kept:   their table is kept with the weights, as some checkpoints do, and read from it.
    """

    examples = ({}, {"layout": "halves", "offset": 2, "spread": "ends"}, {"length": 29, "kept": True})

    def __init__(
        self,
        width: int,
        layout: str = "interleaved",
        base: float = 10000.0,
        offset: int = 0,
        spread: str = "paper",
        length: int | None = None,
        kept: bool = False,
    ):
        super().__init__()
        if layout not in ("interleaved", "halves"):
            raise UserError(f"layout must be 'interleaved' or 'halves', not '{layout}'")
        if spread not in ("paper", "ends"):
            raise UserError(f"spread must be 'paper' or 'ends', not '{spread}'")
        if width % 2:
            raise UserError(f"sinusoidal positions need an even width, not {width}")
        if (kept and length is None) or (length is not None and length < 1):
            raise UserError(f"sinusoidal positions need length >= 1 to be kept, or none, not {length}")
        self.layout, self.offset, self.limit = layout, offset, length
        half = width // 2
        self.rates = tuple(base ** (-i / (half if spread == "paper" else max(half - 1, 1))) for i in range(half))
        self.register_buffer("rows", self.table(torch.arange(length)).float() if kept and length else None)

    def table(self, at: Tensor) -> Tensor:
        """(..., width) for positions (...)."""
        turned = angles(at + self.offset, self.rates)
        if self.layout == "halves":
            return torch.cat((turned.sin(), turned.cos()), -1)
        return torch.stack((turned.sin(), turned.cos()), -1).flatten(-2)

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        if self.rows is not None:
            return x + F.embedding(at.clamp(max=len(self.rows) - 1), self.rows)  # beyond, only padding stands
        return x + self.table(at).to(x.dtype)
