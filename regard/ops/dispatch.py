"""Which code runs: torch's operations or regard's own kernels. This is the one place that decides, and it can say why.

An op asks `kernels_for(tensors)`, or `inference_kernels(tensors)` where it has no backward pass. A part that hands the
weights of its submodules to an op asks first whether they are `plain_linears`, so that hooks and replacements count.
Whoever asks gives the op's name, and what only the op knows to speak against a kernel; `recording` counts what was
decided, and `regard doctor` prints it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from regard.native import private
from regard.native.build import KINDS, Kernels, load_kernels, why_unavailable
from regard.native.private import GLOBAL_HOOKS, HOOKS

FEW_ROWS = 24  # up to which a product is spent on reading the weights, so that every core should read its share
FEW_QUERIES = 8  # up to which the attention kernel for decoding is faster than torch's
LEAST_WORK, NARROW = 1 << 21, 256  # multiplications from which, and channels up to which, our products are faster
WIDE = f"both sides of the matrix have more than {NARROW} channels, where torch's product is faster"
PACKED_WEIGHTS = 1 << 20  # of a linear map, up to which a decoding session holds them a second time, packed


KERNEL, TORCH, SEPARATE = "regard", "torch", "separate ops"  # what an op runs on; the last: others do its work in turn
NO_KERNEL = "regard has no kernel for it"
NOT_PLAIN = "a linear map is not a plain torch.nn.Linear: hooked, parametrized or replaced"


class Decision(NamedTuple):
    """What an op runs on: KERNEL, TORCH or SEPARATE; and why, where it is not a kernel."""

    op: str
    runs_on: str
    why: str


class _Switch(threading.local):
    off = False
    decisions: Counter[Decision] | None = None


_switch = _Switch()


@contextmanager
def recording() -> Iterator[Counter[Decision]]:
    """Inside, in this thread, decisions are counted: how many calls of an op ran on what, and why."""
    before, _switch.decisions = _switch.decisions, Counter()
    try:
        yield _switch.decisions
    finally:
        _switch.decisions = before


def note(op: str, why: str = "", otherwise: str = TORCH) -> None:
    """Count a decision where somebody is recording: for a kernel, or against it where there is a reason why."""
    if _switch.decisions is not None and op:
        _switch.decisions[Decision(op, otherwise if why else KERNEL, why)] += 1


@contextmanager
def disabled() -> Iterator[None]:
    """Inside, in this thread, torch's operations do everything."""
    before, _switch.off = _switch.off, True
    try:
        yield
    finally:
        _switch.off = before


def refusal(first: Tensor, *others: Tensor | None) -> str:
    """Return why the kernels do not take these tensors, whether they learn or not; an empty string where they do."""
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


def kernels_for(first: Tensor, *others: Tensor | None, op: str = "", unless: str = "") -> Kernels | None:
    """Return the kernels if they can take these tensors, whether these learn or not.

    op:     who asks, for those who record decisions.
    unless: what the op itself has against its kernel; empty: nothing.
    """
    return _decided(op, unless or refusal(first, *others))


def inference_kernels(first: Tensor, *others: Tensor | None, op: str = "", unless: str = "") -> Kernels | None:
    """Return the kernels if they can take these tensors and there is nothing to learn from them."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (first, *others)):
        unless = unless or "it is learned from, and this kernel has no backward pass"
    return _decided(op, unless or refusal(first, *others))


def product_kernels(op: str, rows: int, weight: Tensor, first: Tensor, *others: Tensor | None) -> Kernels | None:
    """Return the kernels if they can take these tensors and our matrix product is faster as well."""
    return _decided(op, refusal(first, *others) or _slower(load_kernels(), rows, weight))


def _decided(op: str, reason: str) -> Kernels | None:
    kernels = None if reason else load_kernels()
    if _switch.decisions is not None:
        note(op, "" if kernels is not None else reason or why_unavailable())
    return kernels


def refused(first: Tensor, *others: Tensor | None) -> str:
    """Return why there are no kernels for these tensors; an empty string where there are."""
    return refusal(first, *others) or why_unavailable()


def explain(first: Tensor, *others: Tensor | None) -> str:
    """Return in a few words what computes ops on these tensors, and why."""
    reason = refused(first, *others)
    return f"torch: {reason}" if reason else "regard's kernels"


def is_product_faster(kernels: Kernels, rows: int, weight: Tensor) -> bool:
    """Return whether our matrix product is faster than torch's for so many rows: narrow ones, which torch spends too
    long on packing, on CPUs that its library was not tuned for."""
    reason = _slower(kernels, rows, weight)
    if _switch.decisions is not None:
        note("matrix product", reason)
    return not reason


def _slower(kernels: Kernels | None, rows: int, weight: Tensor) -> str:
    """Return why torch's matrix product is to be preferred; an empty string where ours is faster."""
    if kernels is None:
        return ""
    if not kernels.multiplies:
        return "torch's products are tuned for this CPU"
    if rows * weight.numel() < LEAST_WORK:
        return "the product is so small that torch's is faster"
    return WIDE if min(weight.shape) > NARROW else ""


def is_few_rows(x: Tensor) -> bool:
    """Return whether x (..., width) has so few rows that a product with it only reads the weights."""
    return 0 < x.numel() <= FEW_ROWS * x.shape[-1]


def is_contiguous(*tensors: Tensor | None) -> bool:
    return all(tensor is None or tensor.is_contiguous() for tensor in tensors)


def hooked(module: nn.Module) -> bool:
    """Return whether anything happens when this module is called besides its class's `forward`."""
    return has_own_hooks(module) or any(GLOBAL_HOOKS)


def has_own_hooks(module: nn.Module) -> bool:
    """Return the same for this very module: hooks on all modules, such as a profiler's, change nothing. Nor does a
    `forward` that is marked as one that only watches."""
    own = vars(module)
    return any(own[name] for name in HOOKS) or is_replaced(own, "forward")


def touched(module: nn.Module) -> bool:
    """Return whether its step is anything else than its class's `step`."""
    return bool(touch(module))


def touch(module: nn.Module) -> str:
    """Return what makes its step anything else than its class's `step`; an empty string where nothing does."""
    if has_own_hooks(module):
        return "has a hook or a forward of its own"
    if any(GLOBAL_HOOKS):
        return "is hooked, as all modules are"
    return "has a step of its own" if is_replaced(vars(module), "step") else ""


def inside_touched(module: nn.Module) -> bool:
    """Return whether that is so for any module inside it."""
    return any(touched(child) or inside_touched(child) for child in module._modules.values() if child is not None)


def is_replaced(own: dict[str, Any], method: str) -> bool:
    """Return whether a module, given by its attributes, has a method of its own in place of its class's."""
    return callable(own.get(method)) and not getattr(own[method], "only_watches", False)


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether it is a linear map and nothing more: not hooked, pruned or parametrized."""
    return type(module) is nn.Linear and module._parameters.get("weight") is not None and not hooked(module)


def plain_linears(*modules: nn.Module) -> bool:
    """Return whether calling all these is the same as applying their weights and biases."""
    return all(map(is_plain_linear, modules))
