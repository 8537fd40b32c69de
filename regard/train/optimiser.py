"""Torch's own optimisers, by name, on a model's parameters.

Adam: Kingma & Ba 2015, arXiv:1412.6980. AdamW: Loshchilov & Hutter 2019, arXiv:1711.05101. Adafactor: Shazeer & Stern
2018, arXiv:1804.04235. Muon: Jordan et al. 2024, with the step size of Liu et al. 2025, arXiv:2502.16982.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.core import UserError

if TYPE_CHECKING:
    from .settings import Settings

KINDS = ("adam", "adamw", "muon", "adafactor", "sgd")


class Optimiser:
    """One or two of torch's optimisers that step together: Muon takes matrices only, so that AdamW takes the rest."""

    def __init__(self, model: nn.Module, settings: Settings):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names = {id(p): name for name, p in named}
        self.parameters = [p for _, p in named]
        self.clip = settings.clip
        muon = settings.optimiser == "muon"
        self.parts = _muon(model, self.parameters, settings) if muon else [_one(self.parameters, settings)]

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def norm(self) -> Tensor:
        """Of all gradients together, before they are clipped."""
        return nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])

    def step(self, lr: float, norm: float) -> None:
        """With gradients of this norm."""
        if self.clip and norm > self.clip:
            torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], self.clip / norm)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
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
            by_name.setdefault(name, {})[key] = tensor.clone()  # the optimiser writes into what it is given
        strange = by_name.keys() - set(self.names.values())
        if strange:
            raise UserError(f"the optimiser's state is of another model: it knows '{min(strange)}', which is not here")
        for part in self.parts:
            ours = [self.names[id(p)] for group in part.param_groups for p in group["params"]]
            state = {i: by_name[name] for i, name in enumerate(ours) if name in by_name}
            part.load_state_dict({"state": state, "param_groups": part.state_dict()["param_groups"]})


def _one(parameters: list[nn.Parameter], s: Settings) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if _decays(p)], "weight_decay": s.weight_decay},
        {"params": [p for p in parameters if not _decays(p)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if s.optimiser == "adafactor":
        return torch.optim.Adafactor(groups, s.lr)
    if s.optimiser == "sgd":
        return torch.optim.SGD(groups, s.lr, momentum=s.beta1)
    kind = torch.optim.Adam if s.optimiser == "adam" else torch.optim.AdamW
    return kind(groups, s.lr, (s.beta1, s.beta2), s.eps, fused=_fused(parameters))


def _decays(parameter: nn.Parameter) -> bool:
    """Vectors do not decay, nor does what a part has marked by `decays = False`: rates, poles, places."""
    return parameter.dim() > 1 and getattr(parameter, "decays", True)


def _muon(model: nn.Module, parameters: list[nn.Parameter], s: Settings) -> list[torch.optim.Optimizer]:
    """Muon is for the maps between hidden vectors: tables, heads, vectors and convolutions are left to AdamW."""
    inner = [module for name, module in model.named_modules() if name.partition(".")[0] != "head"]
    maps = {id(m.weight) for m in inner if isinstance(m, nn.Linear) and min(m.weight.shape) > 1}
    matrices = [p for p in parameters if id(p) in maps]
    rest = [p for p in parameters if id(p) not in maps]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(torch.optim.Muon(matrices, s.lr, weight_decay=s.weight_decay, adjust_lr_fn="match_rms_adamw"))
    if rest:
        made.append(torch.optim.AdamW(rest, s.lr, (s.beta1, s.beta2), s.eps, weight_decay=0.0, fused=_fused(rest)))
    return made


def _fused(parameters: list[nn.Parameter]) -> bool | None:
    return all(p.device.type in ("cpu", "cuda") for p in parameters) or None
