"""The law `edited`: a change to the modules or weights of a model, before or during decoding, takes effect immediately
on every path. Each edit is something that users of PyTorch do to a model.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from regard.core import Context, Layer, Mixer, Model, Norm, Position, Stack, part
from regard.decode.session import FUSED_STEP, Session
from regard.ops.dispatch import FEW_ROWS, KERNEL, disabled, recording
from regard.schema import name_of

from . import laws
from .laws import Finding, Subject

Edit = Callable[[Model], object]
MANY_ROWS = FEW_ROWS + 2  # more than the fast path of linear layers takes


def linear_layers(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Return the linear layers of a model, each with its parent and its name there."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and "weight" in child._parameters
    ]


def replace_linear(model: Model) -> None:
    for parent, name, old in linear_layers(model):
        new = nn.Linear(old.in_features, old.out_features, old.bias is not None).to(old.weight).train(old.training)
        setattr(parent, name, new)


def assign_parameter(model: Model) -> None:
    for _, _, linear in linear_layers(model):
        linear.weight = nn.Parameter(linear.weight.detach() * 1.5)
        if linear.bias is not None:
            linear.bias = nn.Parameter(torch.randn_like(linear.bias))


def set_strided_data(model: Model) -> None:
    """Make all parameters non-contiguous."""
    for parameter in model.parameters():
        pairs = torch.randn(*parameter.shape, 2, dtype=parameter.dtype) * 0.1
        parameter.data = pairs[..., 0]


def change_in_place(model: Model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


def change_data(model: Model) -> None:
    """Assign `.data`, which does not bump the version counter."""
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.05 * torch.randn_like(parameter)


def prune_weights(model: Model) -> None:
    for _, _, linear in linear_layers(model):
        prune.random_unstructured(linear, "weight", 0.5)


def normalize_weights(model: Model) -> None:
    """Apply the old weight norm, which works by a hook."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for _, _, linear in linear_layers(model):
            with torch.no_grad():
                linear.weight.add_(0.01)  # a row of zeros cannot be normalized
            nn.utils.weight_norm(linear)  # type: ignore[attr-defined]
            with torch.no_grad():
                linear.weight_g.mul_(1.3)  # type: ignore[union-attr, operator]


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrize_weights(model: Model) -> None:
    for _, _, linear in linear_layers(model):
        parametrize.register_parametrization(linear, "weight", Doubled())


def load_by_assignment(model: Model) -> None:
    tensors = {name: t + 0.05 if t.is_floating_point() else t for name, t in model.state_dict().items()}
    model.load_state_dict(tensors, assign=True)


def replace_norms(model: Model) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Norm) and not child.is_identity:
                new = copy.deepcopy(child)
                with torch.no_grad():
                    for parameter in new.parameters():
                        parameter.add_(0.3)
                setattr(parent, name, new)


def replace_norms_by_none(model: Model) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Norm) and not child.is_identity:
                setattr(parent, name, part(Norm, "none"))


def replace_positions(model: Model) -> None:
    """Replace rotary or no positions in self-attention by ALiBi."""
    for mixer in [m for m in model.modules() if isinstance(m, Mixer)]:
        position = getattr(mixer, "position", None)
        if isinstance(position, Position) and name_of(mixer) == "attention" and getattr(mixer, "over", "") == "self":
            if position.acts("bias") or position.needs_query:
                continue
            new = part(Position, "alibi", width=mixer.width, heads=mixer.heads, dim=mixer.dim)  # type: ignore[arg-type]
            mixer.position = new.double().train(position.training)


def hook_linears(model: Model) -> None:
    for _, _, linear in linear_layers(model):
        linear.register_forward_hook(lambda module, args, y: 1.2 * y)


def hook_before_norms(model: Model) -> None:
    for norm in [m for m in model.modules() if isinstance(m, Norm)]:
        norm.register_forward_pre_hook(lambda module, args: (args[0] * 0.5 + 0.1, *args[1:]))


def hook_mixers(model: Model) -> None:
    """Hook attention, feed-forwards and all other mixers, nested ones included."""
    for mixer in [m for m in model.modules() if isinstance(m, Mixer)]:
        mixer.register_forward_hook(lambda module, args, y: 1.2 * y)


def hook_before_mixers(model: Model) -> None:
    for mixer in [m for m in model.modules() if isinstance(m, Mixer)]:
        mixer.register_forward_pre_hook(lambda module, args: (args[0] + 0.1, *args[1:]))


def hook_layers(model: Model) -> None:
    for layer in [m for m in model.modules() if isinstance(m, Layer) and m.wiring.lanes == 1]:
        layer.register_forward_hook(lambda module, args, y: 0.7 * y)


def hook_stacks(model: Model) -> None:
    for stack in [m for m in model.modules() if isinstance(m, Stack)]:
        stack.register_forward_hook(lambda module, args, y: 0.7 * y)


def hook_ends(model: Model) -> None:
    """Hook the embedding, the head and the model itself."""
    for module in (model.embed, model.head, model):
        module.register_forward_hook(lambda module, args, y: 0.7 * y)


def patch_mixer_forward(model: Model) -> None:
    """Replace `forward` of all mixers by a function that calls it."""
    for mixer in [m for m in model.modules() if isinstance(m, Mixer)]:
        mixer.forward = lambda x, context, forward=mixer.forward: forward(x, context) * 1.2  # type: ignore


def patch_step(model: Model) -> None:
    """Replace `step` of all mixers. A forward pass need not use it, but all steps must."""
    for mixer in [m for m in model.modules() if isinstance(m, Mixer)]:

        def step(x: Tensor, state: object, context: Context, step: Callable = mixer.step) -> tuple[Tensor, object]:
            y, state = step(x, state, context)
            return y * 1.2, state

        mixer.step = step  # type: ignore[method-assign]


def patch_forward(model: Model) -> None:
    for _, _, linear in linear_layers(model):
        linear.forward = lambda x, linear=linear: nn.functional.linear(x, linear.weight, linear.bias) + 0.1  # type: ignore


LINEAR_EDITS: tuple[Edit, ...] = (
    replace_linear, assign_parameter, set_strided_data, change_in_place, change_data, prune_weights, normalize_weights,
    parametrize_weights, load_by_assignment, hook_linears, patch_forward,
)  # fmt: skip
EDITS: tuple[Edit, ...] = (
    *LINEAR_EDITS, replace_norms, replace_norms_by_none, replace_positions, hook_before_norms, hook_mixers,
    hook_before_mixers, hook_layers, hook_stacks, hook_ends, patch_mixer_forward,
)  # fmt: skip


def copy_of(model: Model) -> Model:
    """Return a deep copy. Its empty tables of hooks, a dozen in every module, are made here, because `copy.deepcopy`
    spends most of its time on them."""
    tables = [t for module in model.modules() for t in vars(module).values() if type(t) is OrderedDict and not t]
    return copy.deepcopy(model, {id(table): OrderedDict() for table in tables})


def outputs(model: Model, x: Tensor, memory: object, edit: Edit | None, sizes: Sequence[int]) -> Tensor:
    """Return the outputs of a decoding session in steps of these sizes. With an edit, they are those of a copy of the
    model that is edited after two steps."""
    model = model if edit is None else copy_of(model)
    session = Session(model)
    state, found, begin = model.start(len(x), x.shape[1], memory=memory), [], 0  # type: ignore[arg-type]
    for number, size in enumerate(sizes):
        if edit is not None and number == 2:
            torch.manual_seed(7)
            edit(model)
        y, state = session.step(x[:, begin : begin + size], state)
        found.append(y)
        begin += size
    return torch.cat(found, 1)


def takes_fused_steps(subject: Subject) -> bool:
    with torch.no_grad(), recording() as decisions:
        outputs(subject.module, subject.inputs(2, 1), subject.memory(2), None, (1,))  # type: ignore[arg-type]
    return any(decision.op == FUSED_STEP and decision.runs_on == KERNEL for decision in decisions)


def edited(subject: Subject) -> Finding:
    """Check that an edited model gives the same in steps as in one forward pass, and that one edited while it decodes
    gives the same with kernels as without, where its steps are fused."""
    model = subject.module
    assert isinstance(model, Model)
    worst, at, fuses = 0.0, "", takes_fused_steps(subject)
    with torch.no_grad():
        encoded = subject.memory(2)  # an encoder is in no step
    for edit in EDITS:
        torch.manual_seed(7)
        changed = copy_of(model)
        edit(changed)
        few_rows, many_rows = (2, (1, 1, 1, 2, 1)), (MANY_ROWS, (1, 1))
        for batch, sizes in (few_rows, many_rows) if edit in LINEAR_EDITS else (few_rows,):
            x, memory = subject.inputs(batch, sum(sizes)), laws.select_memory(encoded, torch.arange(batch) % 2)
            with torch.no_grad():
                gap = laws.max_difference(outputs(changed, x, memory, None, sizes), changed(x, memory=memory))
                if batch == 2 and fuses:  # otherwise both are the same code
                    with disabled():
                        plain = outputs(model, x, memory, edit, sizes)
                    gap = max(gap, laws.max_difference(outputs(model, x, memory, edit, sizes), plain))
            if gap > worst:
                worst, at = gap, f"{edit.__name__}, {batch} rows"
    torch.manual_seed(7)
    changed, x = copy_of(model), subject.inputs(2, 4)
    patch_step(changed)
    with torch.no_grad():
        gap = laws.max_difference(*(outputs(changed, x, encoded, None, sizes) for sizes in ((1, 1, 1, 1), (2, 2))))
    if gap > worst:
        worst, at = gap, "patch_step"
    return Finding("edited", worst, laws.LIMIT, f"{len(EDITS)} edits{at and f', the worst: {at}'}")
