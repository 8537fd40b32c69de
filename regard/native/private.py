"""The private names of torch that regard uses, all of them. A test fails when torch changes one."""

import torch
from torch.nn.modules import module as _module

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple(getattr(_module, f"_global{name}") for name in HOOKS)

len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
get_tracing_state = torch._C._get_tracing_state
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_zero_ = torch._foreach_zero_


def is_in_backward() -> bool:
    """Return whether the backward pass is running in this thread."""
    return torch._C._current_graph_task_id() != -1


def keeps_graph() -> bool:
    """Return whether the running backward pass was asked to keep its graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def is_compiler_error(error: Exception) -> bool:
    """Return whether an error comes from torch.compile."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
