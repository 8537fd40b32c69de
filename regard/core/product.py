"""Linear maps of a few rows, which is what decoding is made of. Such a product is spent on reading weights, and torch
has one core read them all: here every core reads its share.

    y = x W^T = (W x^T)^T, the rows of W in as many parts as there are threads
"""

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 32  # rows of x, up to which it pays
LARGE = 1 << 16  # weights, from which on
EXACT = (torch.float32, torch.float64)


class Linear(nn.Linear):
    """A linear map that is fast for a few rows, too."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in), weight (out, in) -> x weight^T + bias"""
    rows = x.numel() // x.shape[-1]
    if not 0 < rows <= FEW or weight.numel() < LARGE or not _pays(x, weight, rows):
        return F.linear(x, weight, bias)
    flat, parts = x.reshape(rows, -1).t(), torch.get_num_threads()
    out, wide = weight.shape
    each = out // parts
    y = torch.bmm(weight[: parts * each].view(parts, each, wide), flat.expand(parts, *flat.shape)).flatten(0, 1)
    if parts * each < out:
        y = torch.cat((y, weight[parts * each :] @ flat))
    return (y.t() if bias is None else y.t() + bias).contiguous().view(*x.shape[:-1], out)


def _pays(x: Tensor, weight: Tensor, rows: int) -> bool:
    if x.device.type != "cpu" or x.dtype not in EXACT or x.dtype != weight.dtype or not weight.is_contiguous():
        return False
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return 1 < torch.get_num_threads() <= len(weight) or (torch.get_num_threads() == 1 and 1 < rows <= 8)


def plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is a linear map and nothing more."""
    return type(module) in (nn.Linear, Linear)


def for_few_rows(model: nn.Module) -> None:
    """Its linear maps become fast for a few rows; in place, and nothing else changes."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
