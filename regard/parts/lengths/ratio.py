"""A canvas that is longer than the target will be: a multiple of the source's length. The target is found in it, as an
alignment (CTC), a path (DAG), or as what stands before the first end token.

    positions = ceil(ratio source length) + extra

Libovicky and Helcl 2018, arXiv:1811.04719; Huang et al. 2022, arXiv:2205.07459.
"""

import math

import torch
from torch import Tensor

from regard.core import Canvases, Length, Memory, UserError, source_lengths

MAX_RATIO, MAX_EXTRA = 100, 10_000


class Ratio(Length):
    """ratio: positions for each source position.
    extra:    positions for every source.
    """

    examples = ({}, {"ratio": 1.5, "extra": 3})
    is_exact = False

    def __init__(self, width: int, ratio: float = 2.0, extra: int = 0):
        super().__init__()
        if not 0 < ratio <= MAX_RATIO or not 0 <= extra <= MAX_EXTRA:
            raise UserError(
                f"ratio must be above 0 and at most {MAX_RATIO}, and extra from 0 to {MAX_EXTRA:,}, not {ratio:g} and "
                f"{extra}"
            )
        self.ratio, self.extra = ratio, extra

    def positions(self, sources: Tensor) -> Tensor:
        return (sources.double() * self.ratio).ceil().long() + self.extra

    def most(self, sources: Tensor) -> Tensor:
        return self.positions(sources)

    def fits(self, sources: Tensor, needed: Tensor) -> Tensor:
        return needed <= self.positions(sources)

    def remedy(self, sources: Tensor, needed: Tensor) -> str:
        ratio = ((needed - self.extra).double() / sources).max()
        return f"model.length.ratio={math.ceil(10 * float(ratio)) / 10:g}"

    def candidates(self, memory: Memory, count: int) -> Canvases:
        lengths = self.positions(source_lengths(memory))
        return Canvases(lengths[:, None], torch.zeros_like(lengths[:, None], dtype=memory.x.dtype))
