"""Makes forward hooks run for steps, too.

torch calls hooks in `module(x)` alone. A module that steps computes the same output by `module(x, context)` and by
`module.step(x, state, context)`; `Steps` turns the second into the first where the module has hooks, so that a hook
runs however a sequence is cut. A hook receives and returns the output, never the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.ops.dispatch import hooked

from .context import Call, Context


class Steps(nn.Module):
    """A module with `forward(x, context)` and `step(x, state, context)`, whose hooks run in both."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "step" in vars(cls):
            cls.step = _step_through_call(vars(cls)["step"])  # type: ignore[attr-defined]
        if "forward" in vars(cls):
            cls.forward = _forward_or_step(vars(cls)["forward"])  # type: ignore[method-assign]


def _step_through_call(step: Callable) -> Callable:
    @wraps(step)
    def through_call(self: nn.Module, x: Any, state: Any, context: Context) -> tuple[Any, Any]:
        inside = context.call is not None and context.call.module is self
        if inside or not hooked(self):
            return step(self, x, state, context)
        call = Call(self, state)
        y = self(x, context=replace(context, call=call))
        if not call.taken:
            name = type(self).__name__
            raise UserError(f"the forward of {name} was replaced by one that takes no steps: replace its step as well")
        return y, call.state

    return through_call


def _forward_or_step(forward: Callable) -> Callable:
    @wraps(forward)
    def or_step(self: nn.Module, x: Any, context: Context) -> Tensor:
        call = context.call
        if call is not None and call.module is self and not call.taken:
            call.taken = True
            y, call.state = type(self).step(self, x, call.state, context)  # type: ignore[attr-defined]
            return y
        if not torch.compiler.is_compiling() and hooked(self):  # hooks of a forward that steps inside run once
            context = replace(context, call=Call(self, None, taken=True))
        return forward(self, x, context)

    return or_step
