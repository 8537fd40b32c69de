"""One step of sparse coding in place of a feed-forward: it moves the vectors towards a sparse code.

    y = relu(x + e D^T (x - D x) - e l)

A step of ISTA, the iterative shrinkage-thresholding algorithm, on |x - D y|^2 / 2 + l |y|_1 with y >= 0, from y = x.
The result replaces the vector instead of being added to it: use the wiring "crate".
Yu et al. 2023, "White-Box Transformers via Sparse Rate Reduction" (CRATE), arXiv:2306.01129.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Context, Cost, Pointwise, UserError


class Ista(Pointwise):
    """step: e above, the step size.
    sparsity: l above, the weight of the L1 penalty.
    """

    examples = ({}, {"step": 0.5, "sparsity": 0.02})

    def __init__(self, width: int, step: float = 0.1, sparsity: float = 0.1):
        super().__init__()
        if step <= 0 or sparsity < 0:
            raise UserError(f"step must be above 0 and sparsity at least 0, not {step} and {sparsity}")
        self.width, self.rate, self.sparsity = width, step, sparsity
        self.dictionary = nn.Parameter(torch.empty(width, width))  # D
        nn.init.kaiming_uniform_(self.dictionary)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        residual = x - F.linear(x, self.dictionary)
        return F.relu(x + self.rate * (residual @ self.dictionary) - self.rate * self.sparsity)

    def cost(self, length: int, past: int = 0) -> Cost:
        return Cost(4 * length * self.dictionary.numel(), 0)

    def value_path(self) -> Iterator[Tensor]:
        yield self.dictionary
