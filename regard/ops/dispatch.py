"""Chooses between torch's operations and regard's own kernels, in this one place, and can explain the choice.

An op asks `kernels_for(tensors)`, or `inference_kernels(tensors)` where it has no backward pass. A part that hands the
weights of its submodules to an op asks first whether they are `plain_linears`, so that hooks and replacements count.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from regard.native import private
from regard.native.build import KINDS, Kernels, load_kernels, why_unavailable
from regard.native.private import GLOBAL_HOOKS, HOOKS

FEW_ROWS = 24  # up to which a matrix product is bound by reading the weights, which all cores should share
FEW_QUERIES = 8  # up to which the attention kernel for decoding is faster than torch's
LEAST_WORK, NARROW = 1 << 21, 256  # multiplications from which, and channels up to which, our products are faster
PACKED_WEIGHTS = 1 << 20  # up to which a decoding session also keeps a packed copy of a linear layer


class _Switch(threading.local):
    off = False


_switch = _Switch()


@contextmanager
def disabled() -> Iterator[None]:
    """Inside, in this thread, torch's operations do everything."""
    before, _switch.off = _switch.off, True
    try:
        yield
    finally:
        _switch.off = before


def refusal(first: Tensor, *others: Tensor | None) -> str:
    """Return why the kernels do not take these tensors, with or without gradients; an empty string where they do."""
    dtype = first.dtype
    if dtype not in KINDS:
        return f"the kernels compute in float32 and float64, not in {str(dtype).removeprefix('torch.')}"
    if not first.is_cpu:
        return f"the kernels run on a CPU, and the tensors are on {first.device}"
    if _switch.off:
        return "the kernels are switched off in this thread"
    for other in others:
        if other is not None and other.dtype != dtype:
            return "the tensors are of several dtypes"
    if private.len_torch_dispatch_stack() or private.get_tracing_state() is not None:
        return "single operations of torch are being recorded"
    if torch.is_autocast_enabled("cpu"):
        return "autocast chooses the dtype of every operation"
    return "torch.compile makes code of its own" if torch.compiler.is_compiling() else ""


def kernels_for(first: Tensor, *others: Tensor | None) -> Kernels | None:
    """Return the kernels if they can take these tensors, with or without gradients."""
    return None if refusal(first, *others) else load_kernels()


def inference_kernels(first: Tensor, *others: Tensor | None) -> Kernels | None:
    """Return the kernels if they can take these tensors and no gradients are needed."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (first, *others)):
        return None
    return kernels_for(first, *others)


def explain(first: Tensor, *others: Tensor | None) -> str:
    """Return in a few words what computes ops on these tensors, and why."""
    if reason := refusal(first, *others):
        return f"torch: {reason}"
    return "regard's kernels" if load_kernels() is not None else f"torch: {why_unavailable()}"


def is_product_faster(kernels: Kernels, rows: int, weight: Tensor) -> bool:
    """Return whether our matrix product is faster than torch's for so many rows: for narrow weights, which torch spends
    too long on packing, on CPUs that its library was not tuned for."""
    return kernels.multiplies and rows * weight.numel() >= LEAST_WORK and min(weight.shape) <= NARROW


def is_few_rows(x: Tensor) -> bool:
    """Return whether x (..., width) has so few rows that a product with it only reads the weights."""
    return 0 < x.numel() <= FEW_ROWS * x.shape[-1]


def is_contiguous(*tensors: Tensor | None) -> bool:
    return all(tensor is None or tensor.is_contiguous() for tensor in tensors)


def hooked(module: nn.Module) -> bool:
    """Return whether anything happens when this module is called besides its class's `forward`."""
    return has_own_hooks(module) or any(GLOBAL_HOOKS)


def has_own_hooks(module: nn.Module) -> bool:
    """Return whether this very module has hooks or a replaced `forward`. Global hooks, such as a profiler's, and a
    `forward` with `only_watches` do not count."""
    own = vars(module)
    return any(own[name] for name in HOOKS) or is_replaced(own, "forward")


def touched(module: nn.Module) -> bool:
    """Return whether its step does anything besides its class's `step`."""
    return hooked(module) or is_replaced(vars(module), "step")


def inside_touched(module: nn.Module) -> bool:
    """Return whether any module inside it is `touched`."""
    return any(touched(child) or inside_touched(child) for child in module._modules.values() if child is not None)


def is_replaced(own: dict[str, Any], method: str) -> bool:
    """Return whether a module, given by its attributes, has a method of its own in place of its class's."""
    return method in own and not getattr(own[method], "only_watches", False)


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether it is a plain nn.Linear: not hooked, pruned or parametrized."""
    return type(module) is nn.Linear and module._parameters.get("weight") is not None and not hooked(module)


def plain_linears(*modules: nn.Module) -> bool:
    """Return whether calling all these is the same as applying their weights and biases."""
    return all(map(is_plain_linear, modules))
