"""Linear maps of a few rows, which is what decoding is made of. Such a product is spent on reading weights, and how
many cores torch has read them depends on the processor: here every core reads its share."""

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import native

FEW = 24  # rows of x, up to which it pays
MATRIX = 1 << 20  # weights of a map, up to which they are held once more for many rows


class Linear(nn.Linear):
    """A linear map that is fast for a few rows, too."""

    near: native.Map | None = None  # where its weights lie
    packed: tuple[Tensor, int, int] | None = None  # its weights in another order, and what these were made of

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.packed = None  # the weights may be about to change, and not every optimiser tells
        return linear(x, self.weight, self.bias)

    def map(self, known: native.Kernels, x: Tensor) -> native.Map | None:
        """As the kernels want it for rows x (..., in); None where they cannot, or should not."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        assert weight is not None
        if weight.dtype != x.dtype or not weight.is_contiguous():
            return None
        if few(x):
            known_as = self.near
            if known_as is None or known_as.held[0] is not weight or known_as.weight != weight.data_ptr():
                known_as = self.near = native.map_of(weight, bias)
            return known_as
        if weight.numel() > MATRIX:
            return None
        made_of = (weight.data_ptr(), weight._version)
        if self.packed is None or self.packed[1:] != made_of:
            self.packed = (native.pack(known, weight), *made_of)
        return native.map_of(weight, bias, self.packed[0])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in), weight (out, in) -> x weight^T + bias"""
    known = native.native(x, weight, bias) if few(x) and weight.is_contiguous() else None
    if known is None:
        return F.linear(x, weight, bias)
    return native.apply(known, native.map_of(weight, bias), flat(x)).view(*x.shape[:-1], weight.shape[0])


def few(x: Tensor) -> bool:
    """Whether x (..., width) are so few rows that our own products pay."""
    return 0 < x.numel() <= FEW * x.shape[-1]


def flat(x: Tensor) -> Tensor:
    """(rows, width), one after the other."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def maps(x: Tensor, *modules: nn.Module) -> tuple[native.Kernels, list[native.Map]] | None:
    """The kernels and these linear maps as they want them, if several things can be done at once to rows x (batch, n,
    width): to a few, or to the next position of many."""
    if torch.is_grad_enabled() or not (x.shape[1] == 1 or few(x)):
        return None
    known = native.native(x) if len({type(module) for module in modules}) == 1 else None
    if known is None:
        return None
    made: list = [m.map(known, x) if hasattr(m, "map") else None for m in modules]  # type: ignore[operator]
    return None if None in made else (known, made)


def learns(x: Tensor, *modules: nn.Module) -> native.Kernels | None:
    """The kernels for learning, if they can do what these modules do to x: linear maps, which nobody watches."""
    if not torch.is_grad_enabled():
        return None
    for module in modules:
        if not plain(module) or module._forward_hooks or module._forward_pre_hooks:
            return None
    known = native.able(x, *(m.weight for m in modules), *(m.bias for m in modules))  # type: ignore[arg-type]
    for module in modules:
        if isinstance(module, Linear):
            module.packed = None  # as in its forward
    return known


def plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is a linear map and nothing more."""
    return type(module) in (nn.Linear, Linear)


def for_few_rows(model: nn.Module) -> None:
    """Its linear maps become fast for a few rows; in place, and nothing else changes."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
        if type(module) is Linear:
            module.near = module.packed = None
