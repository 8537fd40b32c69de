"""Which code runs, and the reason that is given for it."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from regard.native import build
from regard.ops import dispatch

KERNELS = build.load_kernels()


def test_what_learns_has_no_inference_kernels():
    x, learns = torch.randn(2, 3), torch.randn(2, 3, requires_grad=True)
    assert dispatch.inference_kernels(x) is KERNELS
    assert dispatch.inference_kernels(learns) is None
    assert dispatch.inference_kernels(x, learns) is None
    assert dispatch.kernels_for(x, learns) is KERNELS
    with torch.no_grad():
        assert dispatch.inference_kernels(x, learns, None) is KERNELS


@pytest.mark.parametrize(("tensors", "reason"), [
    ((torch.randn(2), torch.randn(2).double()), "several dtypes"),
    ((torch.randn(2).half(),), "not in float16"),
    ((torch.randn(2, device="meta"),), "on meta"),
])  # fmt: skip
def test_refused_tensors(tensors, reason):
    assert dispatch.kernels_for(*tensors) is None
    assert reason in dispatch.refusal(*tensors)
    assert dispatch.explain(*tensors) == f"torch: {dispatch.refusal(*tensors)}"


@pytest.mark.parametrize(("inside", "reason"), [
    (lambda: torch.autocast("cpu", dtype=torch.bfloat16), "autocast"),
    (lambda: FlopCounterMode(display=False), "recorded"),
    (dispatch.disabled, "switched off"),
])  # fmt: skip
def test_refused_modes(inside, reason):
    x = torch.randn(2)
    assert dispatch.refusal(x) == ""
    with inside():
        assert reason in dispatch.refusal(x)
        assert dispatch.kernels_for(x) is None


def test_without_kernels_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(dispatch, "load_kernels", lambda: None)
    monkeypatch.setattr(dispatch, "why_unavailable", lambda: "there is no compiler")
    assert dispatch.explain(torch.randn(2)) == "torch: there is no compiler"


def test_what_touches_a_module():
    module = torch.nn.Linear(2, 3)
    module.step = 16  # a number of somebody's own does not replace the method
    assert dispatch.why_touched(module) == ""
    module.step = lambda x: x
    assert dispatch.why_touched(module) == "has a step of its own"
    hook = module.register_forward_hook(lambda *given: None)
    assert dispatch.why_touched(module) == "has a hook or a forward of its own"
    hook.remove()
    every = torch.nn.modules.module.register_module_forward_hook(lambda *given: None)
    assert dispatch.why_touched(torch.nn.Linear(2, 3)) == "is hooked, as all modules are"
    every.remove()
