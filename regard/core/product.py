"""Linear maps by products of our own, where these are faster. Of a few rows, which is what decoding is made of: such a
product is spent on reading weights, and how many cores torch has read them depends on the CPU; here every core
reads its share. Of many rows, in learning and in reading prompts: see native/matmul.py."""

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.native import train
from regard.native.build import Kernels, inference_kernels, load_kernels, training_kernels
from regard.native.decode import Program, apply, linear_params
from regard.native.matmul import pack_matrix, pays
from regard.native.structs import LinearParams

from .context import Context
from .hooks import hooked, inside_touched, touched
from .mixer import Mixer

FEW = 24  # rows of x, up to which it pays
MATRIX = 1 << 20  # weights of a map, up to which they are held once more for many rows


class Linear(nn.Linear):
    """A linear map that is fast for any number of rows."""

    near: LinearParams | None = None  # where its weights lie
    packed: tuple[LinearParams, tuple, int] | None = None  # with weights in another order, and of what these are

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.packed = None  # the weights may be about to change, and not every optimizer tells
        return linear(x, self.weight, self.bias)

    def map(self, x: Tensor) -> LinearParams | None:
        """As the kernels want it for rows x (..., in); None where they cannot, or should not."""
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        if weight is None or hooked(self):  # pruned, say, so that its weight is made anew before each call
            return None
        near, at = self.near, (weight.data_ptr(), None if bias is None else bias.data_ptr())
        if near is None or near.held[0] is not weight or (near.weight, near.bias) != at:
            near = self.near = linear_params(weight, bias) if _lies_plain(weight, bias) else None
        if near is None or weight.dtype != x.dtype:
            return None
        if few(x):
            return near
        if weight.numel() > MATRIX or weight.is_inference():  # which could not tell that it was changed
            return None
        made_of = (at, weight._version)
        if self.packed is None or self.packed[1:] != made_of:
            known = load_kernels()
            assert known is not None
            self.packed = (linear_params(weight, bias, pack_matrix(known, weight.T).numbers), *made_of)
        return self.packed[0]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in), weight (out, in) -> x weight^T + bias"""
    if few(x):
        known = inference_kernels(x, weight, bias) if _lies_plain(weight, bias) else None
        if known is None:
            return F.linear(x, weight, bias)
        return apply(known, linear_params(weight, bias), flat(x)).view(*x.shape[:-1], weight.shape[0])
    known = training_kernels(x, weight, bias)
    if known is None or not pays(known, x.numel() // max(x.shape[-1], 1), weight):
        return F.linear(x, weight, bias)
    return train.linear(known, x, weight, bias)


def _lies_plain(weight: Tensor, bias: Tensor | None) -> bool:
    return weight.is_contiguous() and (bias is None or bias.is_contiguous())


def few(x: Tensor) -> bool:
    """Whether x (..., width) are so few rows that our own products pay."""
    return 0 < x.numel() <= FEW * x.shape[-1]


def flat(x: Tensor) -> Tensor:
    """(rows, width), one after the other."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def maps(x: Tensor, *modules: nn.Module | None) -> list[LinearParams] | None:
    """These linear maps as the kernels want them, if all of them can take rows x (batch, n, width) at once."""
    if len(set(map(type, modules))) != 1 or not hasattr(modules[0], "map"):
        return None
    made = [module.map(x) for module in modules]  # type: ignore[union-attr, operator]
    return None if None in made else made


def alone(mixer: Mixer, x: Tensor, state: Any, context: Context) -> tuple[Tensor, Any] | None:
    """A step by a mixer's own plan, if it has one: for the next position of rows x (batch, 1, width), or for a few."""
    known = inference_kernels(x) if (x.shape[1] == 1 or few(x)) and not torch.is_grad_enabled() else None
    plan = None if known is None or touched(mixer) or inside_touched(mixer) else mixer.plan(x, state, context)
    if known is None or plan is None:
        return None
    return Program([plan[0]]).run(known, flat(x)).view(*x.shape[:-1], plan[0].leaves), plan[1]


def learns(x: Tensor, *modules: nn.Module) -> Kernels | None:
    """The kernels for learning, which serve for many rows as well, if they can do what these modules do to x: linear
    maps, which nobody watches."""
    if not all(map(is_plain_linear, modules)):
        return None
    known = training_kernels(x, *(m.weight for m in modules), *(m.bias for m in modules))  # type: ignore[arg-type]
    for module in modules:
        if isinstance(module, Linear) and torch.is_grad_enabled():
            module.packed = None  # as in its forward
    return known


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is a linear map and nothing more: not hooked, pruned or parametrized."""
    return type(module) in (nn.Linear, Linear) and module._parameters.get("weight") is not None and not hooked(module)


def own_maps(model: nn.Module) -> None:
    """Its linear maps become those of this file; in place, and nothing else changes."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
        if type(module) is Linear:
            module.near = module.packed = None
