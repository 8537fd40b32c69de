"""Sinusoidal positions: sines and cosines of the position at different frequencies, added to the token vectors.

    p(n, 2i) = sin(n / 10000^(2i/d))      p(n, 2i+1) = cos(n / 10000^(2i/d))

Vaswani et al. 2017, arXiv:1706.03762.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import Position, UserError
from regard.ops.rotary import angles


class Sinusoidal(Position):
    """Nothing is learned, and the length is unlimited by default.

    layout: "interleaved": sines and cosines alternate, as in the paper; "halves": all sines, then all cosines.
    offset: added to every position; fairseq counts from 2.
    spread: "paper": exponents i/(d/2); "ends": i/(d/2 - 1), which reaches the base exactly (tensor2tensor, Whisper).
    length: maximum number of positions; a longer sequence is refused. None: unlimited.
    kept:   the table is stored with the weights, as in some checkpoints, and read from there.
    """

    adds_vectors = True
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
        """Return the position vectors (..., width) for positions (...)."""
        angle = angles(at + self.offset, self.rates)
        if self.layout == "halves":
            return torch.cat((angle.sin(), angle.cos()), -1)
        return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2)

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        if self.rows is not None:
            return x + F.embedding(at.clamp(max=len(self.rows) - 1), self.rows)  # only padding lies beyond
        return x + self.table(at).to(x.dtype)
