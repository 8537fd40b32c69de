"""The law `edited`: whatever is done to the modules and weights of a model, before it decodes or in the midst of it,
counts at once, on every path. Each edit is something that users of PyTorch do to a model.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from regard.core import Mixer, Model, Norm, Position, native, part
from regard.core.parts import name_of

from . import laws
from .laws import Finding, Subject

Edit = Callable[[Model], object]


def linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """The linear maps of a model, each with its parent and its name there."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and "weight" in child._parameters
    ]


def replace_linear(model: Model) -> None:
    for parent, name, old in linears(model):
        new = nn.Linear(old.in_features, old.out_features, old.bias is not None).to(old.weight)
        setattr(parent, name, new)


def assign_parameter(model: Model) -> None:
    for _, _, linear in linears(model):
        linear.weight = nn.Parameter(linear.weight.detach() * 1.5)
        if linear.bias is not None:
            linear.bias = nn.Parameter(torch.randn_like(linear.bias))


def set_strided_data(model: Model) -> None:
    """Biases, weights of norms and weights of maps whose numbers do not lie side by side."""
    for parameter in model.parameters():
        wide = torch.randn(*parameter.shape, 2, dtype=parameter.dtype) * 0.1
        parameter.data = wide[..., 0]


def change_in_place(model: Model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


def change_data(model: Model) -> None:
    """Without a version that tells of it."""
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.05 * torch.randn_like(parameter)


def prune_weights(model: Model) -> None:
    for _, _, linear in linears(model):
        prune.random_unstructured(linear, "weight", 0.5)


def normalize_weights(model: Model) -> None:
    """The older weight norm, which works by a hook."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for _, _, linear in linears(model):
            with torch.no_grad():
                linear.weight.add_(0.01)  # a row of zeros has no direction
            nn.utils.weight_norm(linear)  # type: ignore[attr-defined]
            with torch.no_grad():
                linear.weight_g.mul_(1.3)  # type: ignore[union-attr, operator]


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrize_weights(model: Model) -> None:
    for _, _, linear in linears(model):
        parametrize.register_parametrization(linear, "weight", Doubled())


def load_by_assignment(model: Model) -> None:
    tensors = {name: t + 0.05 if t.is_floating_point() else t for name, t in model.state_dict().items()}
    model.load_state_dict(tensors, assign=True)


def replace_norms(model: Model) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Norm) and not child.idle:
                new = copy.deepcopy(child)
                with torch.no_grad():
                    for parameter in new.parameters():
                        parameter.add_(0.3)
                setattr(parent, name, new)


def replace_norms_by_none(model: Model) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Norm) and not child.idle:
                setattr(parent, name, part(Norm, "none"))


def replace_positions(model: Model) -> None:
    """Attention that turned its queries and keys, or knew no places, has biases instead."""
    for mixer in [m for m in model.modules() if isinstance(m, Mixer)]:
        position = getattr(mixer, "position", None)
        if isinstance(position, Position) and name_of(mixer) == "attention" and getattr(mixer, "over", "") == "self":
            if position.acts("bias") or position.asks:
                continue
            new = part(Position, "alibi", width=mixer.width, heads=mixer.heads, dim=mixer.dim)  # type: ignore[arg-type]
            mixer.position = new.double()


def hook_linears(model: Model) -> None:
    for _, _, linear in linears(model):
        linear.register_forward_hook(lambda module, given, y: 1.2 * y)


def hook_before_norms(model: Model) -> None:
    for norm in [m for m in model.modules() if isinstance(m, Norm)]:
        norm.register_forward_pre_hook(lambda module, given: (given[0] * 0.5 + 0.1, *given[1:]))


def patch_forward(model: Model) -> None:
    for _, _, linear in linears(model):
        linear.forward = lambda x, linear=linear: nn.functional.linear(x, linear.weight, linear.bias) + 0.1  # type: ignore


EDITS: tuple[Edit, ...] = (
    replace_linear, assign_parameter, set_strided_data, change_in_place, change_data, prune_weights, normalize_weights,
    parametrize_weights, load_by_assignment, replace_norms, replace_norms_by_none, replace_positions, hook_linears,
    hook_before_norms, patch_forward,
)  # fmt: skip


def outputs(model: Model, x: Tensor, memory: object, edit: Edit | None) -> Iterator[Tensor]:
    """What comes of single steps; where there is an edit, of a copy of the model that is edited after two of them."""
    model = model if edit is None else copy.deepcopy(model)
    state = model.start(len(x), x.shape[1], memory=memory)  # type: ignore[arg-type]
    for at in range(x.shape[1]):
        if edit is not None and at == 2:
            torch.manual_seed(7)
            edit(model)
        y, state = model.step(x[:, at : at + 1], state)
        yield y


def edited(subject: Subject, time: int = 6, batch: int = 2) -> Finding:
    """An edited model gives the same in steps as whole; one that is edited while it decodes gives the same with kernels
    as without. Single steps, with a few rows and with more than those that count as a few."""
    model = subject.module
    assert isinstance(model, Model)
    worst, at = 0.0, ""
    for edit in EDITS:
        torch.manual_seed(7)
        changed = copy.deepcopy(model)
        edit(changed)
        own = Subject(changed, subject.source)
        x, memory = subject.inputs(batch, time), own.memory(batch)
        with torch.no_grad():
            whole = changed(x, memory=memory)
            stepped = torch.cat(list(outputs(changed, x, memory, None)), 1)
            gap = laws.differ(stepped, whole)
            with native.disabled():
                memory = subject.memory(batch)
                plain = torch.cat(list(outputs(model, x, memory, edit)), 1)
            gap = max(gap, laws.differ(torch.cat(list(outputs(model, x, memory, edit)), 1), plain))
        if gap > worst:
            worst, at = gap, edit.__name__
    return Finding("edited", worst, laws.LIMIT, f"{len(EDITS)} edits{at and f', the worst: {at}'}")
