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

FUSED_STEP, FUSED_ENCODER = "fused step", "fused encoder"
MAX_SOURCE = 64  # positions of a source up to which one call for all layers is the faster way
UNEVEN = "rows write to different slots of the cache, or the cache has another dtype"
NOT_PLAIN_OR_LARGE = "a linear layer is not a plain torch.nn.Linear, or too large to be packed for so many rows"


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
        self._compiled: dict[Stack, FusedStack | str] = {}  # the stacks of the model, or why they cannot be compiled

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
        self._compiled = {stack: fused for stack, fused in self._compiled.items() if not isinstance(fused, str)}
        for fused in self._compiled.values():
            fused.forget_buffers()  # type: ignore[union-attr]

    def encode(self, source: Tensor, valid: Tensor | None = None) -> Memory:
        """Return what `encode` of the model does, but for a single source by one call of a kernel where possible."""
        return self.model.encode(source, valid, run=self._run_encoder)

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
        fused = self.compiled(self.model.stack, x) if x.shape[1] == 1 else "a step of several positions"
        return fused if isinstance(fused, str) else fused.run(x, state, context)

    def _run_encoder(self, x: Tensor, context: Context, layer_outputs: bool) -> tuple[Tensor, tuple, tuple]:
        """Return what `forward_with_states` of the encoder returns."""
        encoder = self.model.encoder
        assert encoder is not None
        found = self._encode_fused(encoder, x, context, layer_outputs)
        if isinstance(found, str):
            note(FUSED_ENCODER, found, SEPARATE)
            return encoder.forward_with_states(x, context, layer_outputs)
        note(FUSED_ENCODER)
        return found, (), ()

    def _encode_fused(self, encoder: Stack, x: Tensor, context: Context, layer_outputs: bool) -> Tensor | str:
        """Return the encoder's output, or why it cannot be fused."""
        if len(x) > 1 or not 0 < x.shape[1] <= MAX_SOURCE or context.valid is not None:
            return f"more than one source, an empty one, one of more than {MAX_SOURCE} positions, or padding"
        if layer_outputs:
            return "the decoder reads the output of every layer"
        fused = self.compiled(encoder, x)
        if isinstance(fused, str):
            return fused
        found = fused.run(x, tuple((None,) * len(layer.mixers) for layer in encoder.layers), context)  # type: ignore
        return found if isinstance(found, str) else found[0]

    def compiled(self, stack: Stack, x: Tensor) -> FusedStack | str:
        """Return a stack of the model, compiled when it is first wanted and after a change; or why it cannot be."""
        if torch.is_grad_enabled():
            return "gradients are enabled: there is no torch.no_grad() around it"
        if stack.training:
            return "the model is in training mode"
        if inference_kernels(x) is None:
            return why_no_kernels(x)
        known = self._compiled.get(stack)
        if isinstance(known, str):  # what cannot be fused once is not tried again
            return known
        if known is None or not known.is_current(x):
            known = self._compiled[stack] = FusedStack.compile(stack, x, packs=stack is self.model.stack)
        return known


class FusedStack:
    """A stack compiled into one kernel call, valid for the modules and weights that it had then."""

    def __init__(
        self,
        modules: list[nn.Module],
        declared: list[FusedAttention | FusedMlp],
        norms: list[list[NormParams | None]],
        last_norm: NormParams | None,
        x: Tensor,
        kernels: Kernels,
        packs: bool,
    ):
        """declared, norms: for every branch of every layer in turn, its description and the norms around it.
        packs: whether weights are packed for many rows, which pays if there are several steps."""
        self.declared, self.norms, self.last_norm, self.dtype = declared, norms, last_norm, x.dtype
        self.snapshot, self.kernels, self.packs = Snapshot(modules), kernels, packs
        self.linears: dict[tuple[nn.Module, bool], LinearParams | None] = {}
        self.program: Program | None = None
        self.planned: list[AttentionStep | None] = []  # the steps that the program was made for
        self.rows = 0

    @classmethod
    def compile(cls, stack: Stack, x: Tensor, packs: bool = True) -> FusedStack | str:
        """Compile a stack; or return why not: a module is modified, in training mode, or not supported by a kernel."""
        if what := why_changed(stack, "the stack"):
            return what
        modules = list(stack.modules())
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
        end, kernels = _norms([stack.norm], x), inference_kernels(x)
        assert kernels is not None
        return end if isinstance(end, str) else cls(modules, every, norms, end[0], x, kernels, packs)

    def forget_buffers(self) -> None:
        self.linears = {key: params for key, params in self.linears.items() if not key[1]}
        self.program, self.planned = None, []

    def is_current(self, x: Tensor) -> bool:
        return self.dtype == x.dtype and self.snapshot.holds()

    def run(self, x: Tensor, state: tuple, context: Context) -> tuple[Tensor, tuple] | str:
        """Take the next position of every row: x (rows, 1, width) -> output of that shape, and the state after it; or
        return why the model must take this step. In an encoder, x is one sequence (1, n, width), and its layers have no
        state but None."""
        states = [own for layer in state for own in layer]
        fits = self.program is not None and self.rows == x.shape[0] * x.shape[1]
        steps = self._steps(x, states, context, fits)
        if steps is None:
            return UNEVEN
        if fits and all(map(_same_buffers, self.planned, steps)):
            assert self.program is not None
            for made, before, step in zip(self.program.branches, self.planned, steps, strict=True):
                if step is not None and step is not before:
                    update_attention(made, step.slot or 0, step.attn_mask, step.row_owner, step.key_count, step.rotary)
            self.planned = steps
        elif not self._plan(x.shape[0] * x.shape[1], steps):
            return NOT_PLAIN_OR_LARGE
        assert self.program is not None
        after = iter([own if step is None else step.state for own, step in zip(states, steps, strict=True)])
        y = self.program.run(self.kernels, flatten_rows(x)).view(x.shape)
        return y, tuple(tuple(next(after) for _ in layer) for layer in state)

    def plan_search(
        self, x: Tensor, state: tuple, context: Context, steps: int, size: int
    ) -> tuple[Program, Tensor] | str:
        """Return the program of the last of so many steps of `size` hypotheses, and which row holds the key of each
        slot (see `Program.search`); or return why the steps differ in more than the slot of the cache.

        x, state, context: of the first step, which has one row.
        """
        planned = self._steps(x, [own for layer in state for own in layer], context, False)
        if planned is None:
            return UNEVEN
        slots = {step.slot for step in planned if step is not None and step.sequential}
        if len(slots) != 1 or any(step and not (step.sequential or step.constant) for step in planned):
            return "a mask, a bias or a rotation differs from step to step"
        before = slots.pop() or 0
        held = torch.zeros(2 * size, before + steps, dtype=torch.long)
        last: list[AttentionStep | None] = []
        for step in planned:
            if step is not None and step.sequential:
                if held.shape[1] >= step.keys.shape[1]:  # whose last slot is for padding
                    return "the cache has no room for all steps"
                keys, values = (_with_rows(t, size, before) for t in (step.keys, step.values))
                step = step._replace(
                    keys=keys, values=values, slot=before + steps - 1, key_count=before + steps, row_owner=held[:size]
                )
            last.append(None if step is None else step if step.sequential else step._replace(queries=size))
        if not self._plan(size, last):
            return NOT_PLAIN_OR_LARGE
        assert self.program is not None
        return self.program, held

    def _steps(self, x: Tensor, states: list, context: Context, fits: bool) -> list[AttentionStep | None] | None:
        """Return for every branch its AttentionStep, None for an MLP; or return None where one cannot be fused. fits:
        the program was made for so many rows."""
        steps: list[AttentionStep | None] = []
        groups: dict[Any, tuple[AttentionStep, Any]] = {}
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
                return None
            groups.setdefault(declared.group, (step, own))
            steps.append(step)
        return steps

    def _plan(self, rows: int, steps: list[AttentionStep | None]) -> bool:
        """Make the program for these rows and buffers; return False where a linear layer cannot take so many rows."""
        made, norms = [], []
        for declared, around, step in zip(self.declared, self.norms, steps, strict=True):
            fused = self._branch(declared, rows, step)
            if fused is None:
                self.program = None
                return False
            made.append(fused)
            norms.append(around)
        self.program, self.planned, self.rows = Program(made, norms, self.last_norm), steps, rows
        return True

    def _branch(self, declared: FusedAttention | FusedMlp, rows: int, step: AttentionStep | None) -> FusedBranch | None:
        if isinstance(declared, FusedMlp):
            first, last, gated = self._all(rows, declared.first, declared.last, declared.gated)
            if first is None or last is None or (gated is None and declared.gated is not None):
                return None
            return plan_mlp(first, last, declared.activation, rows, gated)
        assert step is not None
        modules = (declared.q, declared.k, declared.v, declared.out)
        maps = self._all(rows, *modules)
        if any(made is None and module is not None for made, module in zip(maps, modules, strict=True)):
            return None
        return plan_attention(
            maps, rows, step.keys, step.values, step.slot or 0, declared.scale, step.attn_mask, step.row_owner,
            step.key_count, step.queries, step.rotary,
        )  # fmt: skip

    def _all(self, rows: int, *modules: nn.Module | None) -> list[LinearParams | None]:
        """Return linear layers as structs for the kernel, None for None."""
        many, made = self.packs and rows > FEW_ROWS, []
        for module in modules:
            if module is not None and (module, many) not in self.linears:
                self.linears[module, many] = _linear(self.kernels, module, self.dtype, many)
            made.append(None if module is None else self.linears[module, many])
        return made


def _with_rows(tensor: Tensor, rows: int, slots: int) -> Tensor:
    """Return a tensor like (1, slots or more, ...) with more rows, of which only the first has the old slots."""
    if rows == 1:
        return tensor
    longer = tensor.new_empty(rows, *tensor.shape[1:])
    longer[0, :slots] = tensor[0, :slots]
    return longer


def why_changed(root: nn.Module, name: str) -> str:
    """Return which module in it is hooked, watched, in training mode, or has a method of its own, and what it is; an
    empty string where none is. name: of the root, for the message."""
    for path, module in root.named_modules():
        if what := "is in training mode" if module.training else why_touched(module):
            return f"{path or name} {what}"
        if isinstance(module, Tap) and module.watchers:
            return f"{path} is watched"
    return ""


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
