"""Build a model's optimizer by name: one of torch's, or Muon.

Adam: Kingma & Ba 2015, arXiv:1412.6980. AdamW: Loshchilov & Hutter 2019, arXiv:1711.05101. Adafactor: Shazeer & Stern
2018, arXiv:1804.04235.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.core import UserError
from regard.native import private
from regard.runs.settings import Settings

from .levels import lr_scales
from .muon import Muon

TorchOptimizer = torch.optim.Optimizer


class Optimizer:
    """One or two torch optimizers that step together: Muon updates matrices only, and AdamW the other parameters."""

    def __init__(self, model: nn.Module, settings: Settings):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names = {id(p): name for name, p in named}
        self.parameters = [p for _, p in named]
        self.clip = settings.max_grad_norm
        if not named:
            raise UserError("no parameter is left to train: look at train.freeze and at the passes of the model")
        scales = lr_scales(model, settings.layer_decay, settings.head_lr)
        make = _build_muon if settings.optimizer == "muon" else _build_single
        self.optimizers = make(model, self.parameters, settings, [scales[name] for name, _ in named])

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def norm(self) -> Tensor:
        """Return the norm of all gradients together, before clipping."""
        return nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])

    def step(self, lr: float, norm: float) -> None:
        """Clip the gradients, whose norm is given, and update the parameters."""
        if self.clip and norm > self.clip:
            private.foreach_mul_([p.grad for p in self.parameters if p.grad is not None], self.clip / norm)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["scale"]
            optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Return the state as tensors, named parameter/key."""
        return {
            f"{self.names[id(parameter)]}/{key}": torch.as_tensor(value).detach()
            for optimizer in self.optimizers
            for parameter, state in optimizer.state.items()
            for key, value in state.items()
            if value is not None
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        by_name: dict[str, dict[str, Tensor]] = {}
        for path, tensor in tensors.items():
            name, _, key = path.rpartition("/")
            by_name.setdefault(name, {})[key] = tensor.clone()  # the optimizer writes into what it is given
        unknown = by_name.keys() - set(self.names.values())
        if unknown:
            raise UserError(f"the optimizer's state is of another model: it has '{min(unknown)}', which is not here")
        for optimizer in self.optimizers:
            ours = [self.names[id(p)] for group in optimizer.param_groups for p in group["params"]]
            state = {i: by_name[name] for i, name in enumerate(ours) if name in by_name}
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _build_single(
    model: nn.Module, parameters: list[nn.Parameter], s: Settings, scales: list[float]
) -> list[TorchOptimizer]:
    ours = list(zip(parameters, scales, strict=True))
    decaying = _groups([(p, scale) for p, scale in ours if _decays(p)], s.weight_decay)
    groups = decaying + _groups([(p, scale) for p, scale in ours if not _decays(p)], 0.0)
    if s.optimizer == "adafactor":
        return [torch.optim.Adafactor(groups, s.lr)]
    if s.optimizer == "sgd":
        return [torch.optim.SGD(groups, s.lr, momentum=s.beta1)]
    kind = torch.optim.Adam if s.optimizer == "adam" else torch.optim.AdamW
    return [kind(groups, s.lr, (s.beta1, s.beta2), s.eps, fused=_can_fuse(parameters))]


def _groups(parameters: list[tuple[nn.Parameter, float]], weight_decay: float) -> list[dict[str, Any]]:
    """Return one parameter group for each scale of the learning rate."""
    by_scale: dict[float, list[nn.Parameter]] = {}
    for parameter, scale in parameters:
        by_scale.setdefault(scale, []).append(parameter)
    return [{"params": some, "weight_decay": weight_decay, "scale": scale} for scale, some in by_scale.items()]


def _decays(parameter: nn.Parameter) -> bool:
    """Return whether weight decay applies: not to vectors, nor to parameters that a part has marked by `decays =
    False`, such as decay rates and position tables."""
    return parameter.dim() > 1 and getattr(parameter, "decays", True)


def _build_muon(
    model: nn.Module, parameters: list[nn.Parameter], s: Settings, scales: list[float]
) -> list[TorchOptimizer]:
    """Return Muon for the linear layers between hidden vectors, and AdamW for embedding tables, heads, vectors and
    convolutions."""
    inner = [module for name, module in model.named_modules() if name.partition(".")[0] != "head"]
    maps = {id(m.weight) for m in inner if isinstance(m, nn.Linear) and min(m.weight.shape) > 1}
    ours = list(zip(parameters, scales, strict=True))
    matrices = _groups([(p, scale) for p, scale in ours if id(p) in maps], s.weight_decay)
    rest = [(p, scale) for p, scale in ours if id(p) not in maps]
    made: list[TorchOptimizer] = []
    if matrices:
        made.append(Muon(matrices, s.lr))
    if rest:
        fused = _can_fuse([p for p, _ in rest])
        made.append(torch.optim.AdamW(_groups(rest, 0.0), s.lr, (s.beta1, s.beta2), s.eps, fused=fused))
    return made


def _can_fuse(parameters: list[nn.Parameter]) -> bool | None:
    return all(p.device.type in ("cpu", "cuda") for p in parameters) or None
