"""The private names of torch that regard uses do what regard expects of them: this fails when torch changes one."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from regard.native import private


def test_hooks_are_where_they_are_looked_for():
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: None)
    module.register_forward_pre_hook(lambda *_: None)
    module.register_full_backward_hook(lambda *_: None)
    module.register_full_backward_pre_hook(lambda *_: None)
    assert [len(vars(module)[name]) for name in private.HOOKS] == [1, 1, 1, 1]
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert sum(map(len, private.GLOBAL_HOOKS)) == 1
    handle.remove()
    assert not any(private.GLOBAL_HOOKS)


def test_who_watches_single_operations_is_counted():
    assert private.len_torch_dispatch_stack() == 0
    with FlopCounterMode(display=False):
        assert private.len_torch_dispatch_stack() > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tracing_is_noticed():
    seen = []
    assert private.get_tracing_state() is None
    torch.jit.trace(lambda x: seen.append(private.get_tracing_state()) or x + 1, torch.zeros(1), check_trace=False)
    assert seen[0] is not None


def test_the_backward_pass_is_noticed():
    seen = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, dy):
            seen.append((private.is_in_backward(), private.keeps_graph()))
            return dy

    for keep in (True, False):
        Watch.apply(torch.zeros(1, requires_grad=True)).backward(retain_graph=keep)
    assert seen == [(True, True), (True, False)]
    assert not private.is_in_backward()


def test_lists_of_tensors_are_changed_at_once():
    values = [torch.ones(2), torch.ones(3)]
    private.foreach_mul_(values, 3.0)
    private.foreach_lerp_(values, [torch.zeros(2), torch.zeros(3)], 0.5)
    assert [v.tolist() for v in values] == [[1.5] * 2, [1.5] * 3]
    private.foreach_zero_(values)
    assert not any(v.any() for v in values)
