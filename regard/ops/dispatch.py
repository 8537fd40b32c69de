"""Chooses between torch's operations and regard's own kernels, in this one place, and can explain the choice.

An op asks `kernels_for(tensors)`, or `inference_kernels(tensors)` where it has no backward pass. A part that hands the
weights of its submodules to an op asks first whether they are `plain_linears`, so that hooks and replacements count.
An op passes its name, and the reason where it cannot use a kernel itself; `recording` counts these decisions, and
`regard doctor` prints them.
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

FEW_ROWS = 24  # up to which a matrix product is bound by reading the weights, which all cores should share
FEW_QUERIES = 8  # up to which the attention kernel for decoding is faster than torch's
LEAST_WORK, NARROW = 1 << 21, 256  # multiplications from which, and channels up to which, our products are faster
PACKED_WEIGHTS = 1 << 20  # up to which a decoding session also keeps a packed copy of a linear layer

KERNEL, TORCH, SEPARATE = "regard", "torch", "separate ops"  # what runs an op; the last: other ops, one after another
NO_KERNEL = "regard has no kernel for it"
NOT_PLAIN = "a linear layer is not a plain torch.nn.Linear: hooked, parametrized or replaced"
TOO_WIDE = f"both sides of the matrix have more than {NARROW} channels, where torch's product is faster"


class Decision(NamedTuple):
    """What runs an op: KERNEL, TORCH or SEPARATE; and the reason, unless it is a kernel."""

    op: str
    runs_on: str
    why: str


class _Switch(threading.local):
    off = False
    decisions: Counter[Decision] | None = None


_switch = _Switch()


@contextmanager
def recording() -> Iterator[Counter[Decision]]:
    """Inside, in this thread, count the decisions: how many calls of each op ran on what, and why."""
    before, _switch.decisions = _switch.decisions, Counter()
    try:
        yield _switch.decisions
    finally:
        _switch.decisions = before


def note(op: str, why: str = "", otherwise: str = TORCH) -> None:
    """Count a decision while `recording`: for a kernel, or for `otherwise` where there is a reason against it."""
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


def kernels_for(first: Tensor, *others: Tensor | None, op: str = "", unless: str = "") -> Kernels | None:
    """Return the kernels if they can take these tensors, with or without gradients.

    op:     the name under which the decision is recorded; empty: it is not.
    unless: the op's own reason not to use its kernel; empty: there is none.
    """
    return _decide(op, unless or refusal(first, *others))


def inference_kernels(first: Tensor, *others: Tensor | None, op: str = "", unless: str = "") -> Kernels | None:
    """Return the kernels if they can take these tensors and no gradients are needed."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (first, *others)):
        unless = unless or "gradients are needed, and this kernel has no backward pass"
    return _decide(op, unless or refusal(first, *others))


def product_kernels(op: str, rows: int, weight: Tensor, first: Tensor, *others: Tensor | None) -> Kernels | None:
    """Return the kernels if they can take these tensors and our matrix product is the faster one."""
    return _decide(op, refusal(first, *others) or _why_slower(load_kernels(), rows, weight))


def _decide(op: str, reason: str) -> Kernels | None:
    """Return the kernels unless there is a reason against them, and record the decision."""
    kernels = None if reason else load_kernels()
    if _switch.decisions is not None:
        note(op, "" if kernels is not None else reason or why_unavailable())
    return kernels


def why_no_kernels(first: Tensor, *others: Tensor | None) -> str:
    """Return why there are no kernels for these tensors; an empty string where there are."""
    reason = refusal(first, *others)
    return reason if reason or load_kernels() is not None else why_unavailable() or "there are no kernels"


def explain(first: Tensor, *others: Tensor | None) -> str:
    """Return in a few words what computes ops on these tensors, and why."""
    reason = why_no_kernels(first, *others)
    return f"torch: {reason}" if reason else "regard's kernels"


def is_product_faster(kernels: Kernels, rows: int, weight: Tensor) -> bool:
    """Return whether our matrix product is faster than torch's for so many rows: for narrow weights, which torch spends
    too long on packing, on CPUs that its library was not tuned for."""
    reason = _why_slower(kernels, rows, weight)
    if _switch.decisions is not None:
        note("matrix product", reason)
    return not reason


def _why_slower(kernels: Kernels | None, rows: int, weight: Tensor) -> str:
    """Return why our matrix product is slower than torch's; an empty string where it is not."""
    if kernels is None:
        return ""
    if not kernels.multiplies:
        return "torch's products are tuned for this CPU"
    if rows * weight.numel() < LEAST_WORK:
        return "the product is so small that torch's is faster"
    return TOO_WIDE if min(weight.shape) > NARROW else ""


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
    return bool(why_touched(module))


def why_touched(module: nn.Module) -> str:
    """Return why its step does anything besides its class's `step`; an empty string where it does not."""
    if has_own_hooks(module):
        return "has a hook or a forward of its own"
    if any(GLOBAL_HOOKS):
        return "is hooked, as all modules are"
    return "has a step of its own" if is_replaced(vars(module), "step") else ""


def inside_touched(module: nn.Module) -> bool:
    """Return whether any module inside it is `touched`."""
    return any(touched(child) or inside_touched(child) for child in module._modules.values() if child is not None)


def is_replaced(own: dict[str, Any], method: str) -> bool:
    """Return whether a module, given by its attributes, has a method of its own in place of its class's."""
    return callable(own.get(method)) and not getattr(own[method], "only_watches", False)


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether it is a plain nn.Linear: not hooked, pruned or parametrized."""
    return type(module) is nn.Linear and module._parameters.get("weight") is not None and not hooked(module)


def plain_linears(*modules: nn.Module) -> bool:
    """Return whether calling all these is the same as applying their weights and biases."""
    return all(map(is_plain_linear, modules))
