"""Optimizers, by name, on a model's parameters: torch's own, and Muon.

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

from .levels import rates
from .muon import Muon

Torchs = torch.optim.Optimizer


class Optimizer:
    """One or two optimizers that step together: Muon takes matrices only, so that AdamW takes the rest."""

    def __init__(self, model: nn.Module, settings: Settings):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names = {id(p): name for name, p in named}
        self.parameters = [p for _, p in named]
        self.clip = settings.max_grad_norm
        if not named:
            raise UserError("nothing is left to learn: look at train.freeze and at the passes of the model")
        shares = rates(model, settings.layer_decay, settings.head_lr)
        make = _muon if settings.optimizer == "muon" else _one
        self.parts = make(model, self.parameters, settings, [shares[name] for name, _ in named])

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def norm(self) -> Tensor:
        """Of all gradients together, before they are clipped."""
        return nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])

    def step(self, lr: float, norm: float) -> None:
        """With gradients of this norm."""
        if self.clip and norm > self.clip:
            private.foreach_mul_([p.grad for p in self.parameters if p.grad is not None], self.clip / norm)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr * group["share"]
            part.step()

    def state(self) -> dict[str, Tensor]:
        """All of it as tensors, named parameter/what."""
        return {
            f"{self.names[id(parameter)]}/{key}": torch.as_tensor(value).detach()
            for part in self.parts
            for parameter, state in part.state.items()
            for key, value in state.items()
            if value is not None
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        by_name: dict[str, dict[str, Tensor]] = {}
        for path, tensor in tensors.items():
            name, _, key = path.rpartition("/")
            by_name.setdefault(name, {})[key] = tensor.clone()  # the optimizer writes into what it is given
        strange = by_name.keys() - set(self.names.values())
        if strange:
            raise UserError(f"the optimizer's state is of another model: it knows '{min(strange)}', which is not here")
        for part in self.parts:
            ours = [self.names[id(p)] for group in part.param_groups for p in group["params"]]
            state = {i: by_name[name] for i, name in enumerate(ours) if name in by_name}
            part.load_state_dict({"state": state, "param_groups": part.state_dict()["param_groups"]})


def _one(model: nn.Module, parameters: list[nn.Parameter], s: Settings, shares: list[float]) -> list[Torchs]:
    ours = list(zip(parameters, shares, strict=True))
    decaying = _groups([(p, share) for p, share in ours if _decays(p)], s.weight_decay)
    groups = decaying + _groups([(p, share) for p, share in ours if not _decays(p)], 0.0)
    if s.optimizer == "adafactor":
        return [torch.optim.Adafactor(groups, s.lr)]
    if s.optimizer == "sgd":
        return [torch.optim.SGD(groups, s.lr, momentum=s.beta1)]
    kind = torch.optim.Adam if s.optimizer == "adam" else torch.optim.AdamW
    return [kind(groups, s.lr, (s.beta1, s.beta2), s.eps, fused=_fused(parameters))]


def _groups(parameters: list[tuple[nn.Parameter, float]], weight_decay: float) -> list[dict[str, Any]]:
    """One for each share of the learning rate."""
    by_share: dict[float, list[nn.Parameter]] = {}
    for parameter, share in parameters:
        by_share.setdefault(share, []).append(parameter)
    return [{"params": some, "weight_decay": weight_decay, "share": share} for share, some in by_share.items()]


def _decays(parameter: nn.Parameter) -> bool:
    """Vectors do not decay, nor does what a part has marked by `decays = False`: rates, poles, places."""
    return parameter.dim() > 1 and getattr(parameter, "decays", True)


def _muon(model: nn.Module, parameters: list[nn.Parameter], s: Settings, shares: list[float]) -> list[Torchs]:
    """Muon is for the maps between hidden vectors: tables, heads, vectors and convolutions are left to AdamW."""
    inner = [module for name, module in model.named_modules() if name.partition(".")[0] != "head"]
    maps = {id(m.weight) for m in inner if isinstance(m, nn.Linear) and min(m.weight.shape) > 1}
    ours = list(zip(parameters, shares, strict=True))
    matrices = _groups([(p, share) for p, share in ours if id(p) in maps], s.weight_decay)
    rest = [(p, share) for p, share in ours if id(p) not in maps]
    made: list[Torchs] = []
    if matrices:
        made.append(Muon(matrices, s.lr))
    if rest:
        fused = _fused([p for p, _ in rest])
        made.append(torch.optim.AdamW(_groups(rest, 0.0), s.lr, (s.beta1, s.beta2), s.eps, fused=fused))
    return made


def _fused(parameters: list[nn.Parameter]) -> bool | None:
    return all(p.device.type in ("cpu", "cuda") for p in parameters) or None
