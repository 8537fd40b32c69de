"""A decoding session: steps a model, the whole stack in one kernel call per token where that is possible.

`Model.step` is the definition. A session compiles the same step once from what the parts declare (core/fusion.py), and
takes it as long as nothing in the stack is hooked, replaced, watched, reassigned, training or learning; otherwise, and
for longer steps, it calls the model. A session belongs to one thread; states may be exchanged with the model at will.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq
from typing import Any

import torch
from torch import Tensor, nn

from regard.core import Memory, Model, Norm, Stack, State, Tap
from regard.core.context import Context
from regard.core.fusion import AttentionStep, FusedAttention, FusedMlp, FusedNorm
from regard.native.build import Kernels
from regard.native.decode import Program, linear_params, norm_params, plan_attention, plan_mlp, update_attention
from regard.native.matmul import pack_matrix
from regard.native.private import GLOBAL_HOOKS, HOOKS
from regard.native.structs import FusedBranch, LinearParams, NormParams
from regard.ops.dispatch import (
    FEW_ROWS,
    PACKED_WEIGHTS,
    SEPARATE,
    hooked,
    inference_kernels,
    is_contiguous,
    is_plain_linear,
    note,
    why_no_kernels,
    why_touched,
)
from regard.ops.linear import flatten_rows
from regard.schema import name_of

from .int8 import Int8Linear

FUSED_STEP = "fused step"


def session(model: Any) -> Any:
    """Return a session for a model, or an ensemble with a session for each of its models."""
    if isinstance(model, Model):
        return Session(model)
    return model.session() if hasattr(model, "session") else model


class Session:
    """Steps a model by its own methods, with fused kernels where possible."""

    def __init__(self, model: Model):
        self.model, self.vocab = model, model.vocab
        self.reorder, self.logits_for, self.output_projection = model.reorder, model.logits_for, model.output_projection
        self._fused: FusedStack | None = None
        self._why_never_fused = ""  # empty until it is known that no step can be fused

    @property
    def is_hooked(self) -> bool:
        """Whether the model has hooks, which need the logits of every step."""
        return hooked(self.model)

    @property
    def is_head_touched(self) -> bool:
        return self.model.is_head_touched

    def logits(self, x: Tensor) -> Tensor:
        return self.model.logits(x)

    def start(self, batch: int, capacity: int, *, memory: Memory | None = None) -> State:
        self.forget_buffers()
        return self.model.start(batch, capacity, memory=memory)

    def forget_buffers(self) -> None:
        """Let go of the states of the last search, and of packed copies of weights, which may be changed before the
        next one without a sign (`.data`, fused optimizers). What was compiled is kept."""
        self._why_never_fused = ""
        if self._fused is not None:
            self._fused.forget_buffers()

    def step(
        self, tokens: Tensor, state: State, valid: Tensor | None = None, segments: Tensor | None = None
    ) -> tuple[Tensor, State]:
        if self.is_hooked:
            note(FUSED_STEP, f"the model {why_touched(self.model)}", SEPARATE)
            return self.model.step(tokens, state, valid, segments)
        x, context, state = self.model.advance(tokens, state, valid, segments, self._step_stack)
        return self.model.head(x, context), state

    def last_hidden(self, tokens: Tensor, state: State, valid: Tensor | None = None) -> tuple[Tensor, State]:
        return self.model.last_hidden(tokens, state, valid, self._step_stack)

    def _step_stack(self, x: Tensor, state: tuple, context: Context) -> tuple[Tensor, tuple]:
        found = self._step_fused(x, state, context)
        if isinstance(found, str):
            note(FUSED_STEP, found, SEPARATE)
            return self.model.stack.step(x, state, context)
        note(FUSED_STEP)
        return found

    def _step_fused(self, x: Tensor, state: tuple, context: Context) -> tuple[Tensor, tuple] | str:
        """Return the step, or why it cannot be fused."""
        if self._why_never_fused:
            return self._why_never_fused
        if x.shape[1] != 1:
            return "a step of several positions"
        if torch.is_grad_enabled():
            return "gradients are enabled: there is no torch.no_grad() around it"
        if self.model.stack.training:
            return "the model is in training mode"
        kernels = inference_kernels(x)
        if kernels is None:
            return why_no_kernels(x)
        if self._fused is None or not self._fused.is_current(self.model.stack, x):
            compiled = FusedStack.compile(self.model.stack, x)
            if isinstance(compiled, str):
                self._fused, self._why_never_fused = None, compiled  # what cannot be fused once is not tried again
                return compiled
            self._fused = compiled
        return self._fused.run(kernels, x, state, context)


class FusedStack:
    """A stack compiled into one kernel call, valid for the modules and weights that it had then."""

    def __init__(
        self,
        modules: list[nn.Module],
        declared: list[FusedAttention | FusedMlp],
        norms: list[list[NormParams | None]],
        last_norm: NormParams | None,
        x: Tensor,
    ):
        """declared, norms: for every branch of every layer in turn, its description and the norms around it."""
        self.declared, self.norms, self.last_norm, self.dtype = declared, norms, last_norm, x.dtype
        self.stack, self.snapshot = modules[0], Snapshot(modules)
        self.linears: dict[tuple[nn.Module, bool], LinearParams | None] = {}
        self.program: Program | None = None
        self.planned: list[AttentionStep | None] = []  # the steps that the program was made for
        self.rows = 0

    @classmethod
    def compile(cls, stack: Stack, x: Tensor) -> FusedStack | str:
        """Compile a stack; or return why not: a module is modified, in training mode, or not supported by a kernel."""
        modules = list(stack.modules())
        for path, module in stack.named_modules():
            if what := "is in training mode" if module.training else why_touched(module):
                return f"{path or 'the stack'} {what}"
            if isinstance(module, Tap) and module.watchers:
                return f"{path} is watched"
        every: list[FusedAttention | FusedMlp] = []
        norms: list[list[NormParams | None]] = []
        for layer in stack.layers:
            for index, (branch, mixer) in enumerate(layer.branches.items()):  # type: ignore[union-attr, operator]
                around, declared = layer.wiring.norms_around(index), mixer.fused()  # type: ignore[union-attr, operator]
                if declared is None:
                    which = branch if branch in ("mixer", "feedforward") else f"{branch} mixer"
                    return f"the {which} '{name_of(mixer)}' declares nothing to fuse"
                if around is None:
                    return f"the wiring '{name_of(layer.wiring)}' does more than the fused step supports"
                both = _norms(around, x)
                if isinstance(both, str):
                    return both
                every.append(declared)
                norms.append(both)
        end = _norms([stack.norm], x)
        return end if isinstance(end, str) else cls(modules, every, norms, end[0], x)

    def forget_buffers(self) -> None:
        self.linears = {key: params for key, params in self.linears.items() if not key[1]}
        self.program, self.planned = None, []

    def is_current(self, stack: Stack, x: Tensor) -> bool:
        return self.stack is stack and self.dtype == x.dtype and self.snapshot.holds()

    def run(self, kernels: Kernels, x: Tensor, state: tuple, context: Context) -> tuple[Tensor, tuple] | str:
        """Take the next position of every row: x (rows, 1, width) -> output of that shape, and the state after it; or
        return why the model must take this step."""
        states = [own for layer in state for own in layer]
        steps: list[AttentionStep | None] = []
        groups: dict[Any, tuple[AttentionStep, Any]] = {}
        fits = self.program is not None and self.rows == len(x)
        for index, (declared, own) in enumerate(zip(self.declared, states, strict=True)):
            if isinstance(declared, FusedMlp):
                steps.append(None)
                continue
            before = self.planned[index] if fits else None
            if before is not None and before.constant and before.state is own:
                steps.append(before)
                continue
            first = groups.get(declared.group)
            step = None if first is None else declared.follow(first[0], first[1], own)
            step = step or declared.step(x, own, context)
            if step is None:
                return "rows write to different slots of the cache, or the cache has another dtype"
            groups.setdefault(declared.group, (step, own))
            steps.append(step)
        if fits and all(map(_same_buffers, self.planned, steps)):
            assert self.program is not None
            for made, before, step in zip(self.program.branches, self.planned, steps, strict=True):
                if step is not None and step is not before:
                    update_attention(made, step.slot or 0, step.attn_mask, step.row_owner, step.key_count, step.rotary)
            self.planned = steps
        elif not self._plan(kernels, x, steps):
            return "a linear layer is not a plain torch.nn.Linear, or too large to be packed for so many rows"
        assert self.program is not None
        after = iter([own if step is None else step.state for own, step in zip(states, steps, strict=True)])
        y = self.program.run(kernels, flatten_rows(x)).view(x.shape)
        return y, tuple(tuple(next(after) for _ in layer) for layer in state)

    def _plan(self, kernels: Kernels, x: Tensor, steps: list[AttentionStep | None]) -> bool:
        """Make the program for these rows and buffers; return False where a linear layer cannot take so many rows."""
        made, norms = [], []
        for declared, around, step in zip(self.declared, self.norms, steps, strict=True):
            fused = self._branch(kernels, declared, len(x), step)
            if fused is None:
                self.program = None
                return False
            made.append(fused)
            norms.append(around)
        self.program, self.planned, self.rows = Program(made, norms, self.last_norm), steps, len(x)
        return True

    def _branch(
        self, kernels: Kernels, declared: FusedAttention | FusedMlp, rows: int, step: AttentionStep | None
    ) -> FusedBranch | None:
        if isinstance(declared, FusedMlp):
            first, last, gated = self._all(kernels, rows, declared.first, declared.last, declared.gated)
            if first is None or last is None or (gated is None and declared.gated is not None):
                return None
            return plan_mlp(first, last, declared.activation, rows, gated)
        assert step is not None
        modules = (declared.q, declared.k, declared.v, declared.out)
        maps = self._all(kernels, rows, *modules)
        if any(made is None and module is not None for made, module in zip(maps, modules, strict=True)):
            return None
        return plan_attention(
            maps, rows, step.keys, step.values, step.slot or 0, declared.scale, step.attn_mask, step.row_owner,
            step.key_count, step.queries, step.rotary,
        )  # fmt: skip

    def _all(self, kernels: Kernels, rows: int, *modules: nn.Module | None) -> list[LinearParams | None]:
        """Return linear layers as structs for the kernel, None for None."""
        many, made = rows > FEW_ROWS, []
        for module in modules:
            if module is not None and (module, many) not in self.linears:
                self.linears[module, many] = _linear(kernels, module, self.dtype, many)
            made.append(None if module is None else self.linears[module, many])
        return made


def _linear(kernels: Kernels, module: nn.Module, dtype: torch.dtype, many: bool) -> LinearParams | None:
    """Return a linear layer as a struct for the kernel, its weights packed for many rows; None where that cannot be."""
    if isinstance(module, Int8Linear):
        return None if many or not is_contiguous(module.bias) else module.params()
    if not is_plain_linear(module):
        return None
    weight, bias = module.weight, module.bias
    if weight.dtype != dtype or not is_contiguous(weight, bias):
        return None
    if not many:
        return linear_params(weight, bias)
    if weight.numel() > PACKED_WEIGHTS or weight.is_inference():  # changes of an inference tensor cannot be detected
        return None
    return linear_params(weight, bias, pack_matrix(kernels, weight.T).numbers)


def _norms(norms: Sequence[Norm | None], x: Tensor) -> list[NormParams | None] | str:
    """Return norms as structs for the kernel, None for identities; or why one is not supported."""
    made: list[NormParams | None] = []
    for norm in norms:
        if norm is None or norm.is_identity:
            made.append(None)
            continue
        declared: FusedNorm | None = norm.fused()
        params = None if declared is None else norm_params(x, *declared)
        if params is None:
            return f"the norm '{name_of(norm)}' declares nothing to fuse"
        made.append(params)
    return made


def _same_buffers(planned: AttentionStep | None, now: AttentionStep | None) -> bool:
    """Return whether two steps use the same memory in the same layout."""
    if planned is None or now is None:
        return planned is now
    return planned is now or (
        planned.queries == now.queries
        and all(
            old is new or (old.data_ptr() == new.data_ptr() and old.shape == new.shape and old.stride() == new.stride())
            for old, new in ((planned.keys, now.keys), (planned.values, now.values))
        )
    )


class Snapshot:
    """What a fused step depends on: attributes, submodules, parameters, hooks and watchers of every module, and the
    addresses and versions of the weights."""

    def __init__(self, modules: list[nn.Module]):
        attributes = [vars(module) for module in modules]
        inside = [own[name] for own in attributes for name in ("_modules", "_parameters", "_buffers")]
        taps = [module.watchers for module in modules if isinstance(module, Tap)]
        hooks = [own[name] for own in attributes for name in HOOKS]
        self.empty = [*GLOBAL_HOOKS, *taps, *hooks, *(held for held in inside if not held)]
        self.held = [*attributes, *filter(None, inside)]
        self.before = [dict(held) for held in self.held]
        self.weights = [t for own in attributes for t in own["_parameters"].values() if t is not None]
        self.versioned = [weight for weight in self.weights if not weight.is_inference()]  # the others have no version
        self.where = self._where()

    def holds(self) -> bool:
        if any(self.empty):
            return False
        try:
            return all(map(eq, self.held, self.before)) and self._where() == self.where
        except RuntimeError:  # a tensor was replaced by another
            return False

    def _where(self) -> tuple[list[int], list[int], bool]:
        places = [weight.data_ptr() for weight in self.weights]
        return places, [weight._version for weight in self.versioned], all(map(Tensor.is_contiguous, self.weights))
