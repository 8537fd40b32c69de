"""LoRA: the trained weights are frozen, and a low-rank adapter beside each linear layer is trained.

    y = W x + b + (alpha / rank) U D x          D (rank, in) random, U (out, rank) initialized to zero

At first the model is unchanged. After training, W + (alpha / rank) U D is a plain linear layer again: see `merge`.

Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685.
"""

from __future__ import annotations

import math
from fnmatch import fnmatch
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.bases.replace import replace_modules
from regard.core import Dropout, Pass, UserError, restore
from regard.errors import short
from regard.files.paths import must_be_new
from regard.ops.dispatch import is_plain_linear
from regard.runs.folder import save_derived

PROJECTIONS = {"q": "q", "k": "k", "v": "v", "o": "out"}  # of an attention, by letter


class Lora(Pass):
    """Adds adapters to the linear layers of a model and freezes everything else.

    rank:    rank of the adapters.
    alpha:   scale of the adapters, before it is divided by the rank.
    dropout: dropout on the input of the adapters.
    on:      letters of 'qkvo' for the projections of every attention; or a list of names of linear layers, with * as
             wildcard.
    learn:   names of other weights that are trained, with * as wildcard, such as those of a new head.
    """

    examples = ({}, {"rank": 3, "alpha": 5.0, "on": ["*.feedforward.*"]})

    def __init__(
        self,
        rank: int = 8,
        alpha: float = 16.0,
        dropout: float = 0.0,
        on: str | list = "qv",
        learn: list | None = None,
    ):
        if rank < 1:
            raise UserError(f"rank must be at least 1, not {rank}")
        if isinstance(on, str) and (not on or set(on) - set(PROJECTIONS)):
            raise UserError(f"on takes letters of 'qkvo', or a list of names such as ['*.feedforward.*'], not '{on}'")
        self.rank, self.alpha, self.dropout, self.on, self.learn = rank, alpha, dropout, on, tuple(learn or ())

    def __call__(self, model: nn.Module) -> None:
        attentions = {path for path, m in model.named_modules() if isinstance(getattr(m, "q", None), nn.Linear)}

        def chosen(path: str) -> bool:
            if not isinstance(self.on, str):
                return any(fnmatch(path, name) for name in self.on)
            parent, _, name = path.rpartition(".")
            return parent in attentions and name in [PROJECTIONS[letter] for letter in self.on]

        def change(path: str, module: nn.Module) -> nn.Module | None:
            if not is_plain_linear(module) or not chosen(path):
                return None
            return LoraLinear.from_linear(module, self.rank, self.alpha, self.dropout)

        if not replace_modules(model, change):
            raise UserError(f"there is no linear layer to adapt: on = {self.on!r} matches none")
        adapters = {id(p) for m in model.modules() if isinstance(m, LoraLinear) for p in (m.down, m.up)}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) not in adapters and not any(fnmatch(name, pattern) for pattern in self.learn):
                parameter.requires_grad_(False)


class LoraLinear(nn.Linear):
    """A linear layer with an adapter. The frozen weights keep their names."""

    def __init__(self, in_features: int, out_features: int, bias: bool, rank: int, alpha: float, dropout: float):
        super().__init__(in_features, out_features, bias, device="meta")
        self.down = nn.Parameter(torch.empty(rank, in_features))
        self.up = nn.Parameter(torch.zeros(out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
        self.scale, self.drop = alpha / rank, Dropout(dropout)

    @classmethod
    def from_linear(cls, linear: nn.Linear, rank: int, alpha: float, dropout: float) -> LoraLinear:
        """Return a LoraLinear that shares the parameters of a linear layer."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, rank, alpha, dropout)
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.down.data, layer.up.data = layer.down.data.to(linear.weight), layer.up.data.to(linear.weight)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        update = F.linear(F.linear(self.drop(x), self.down), self.up)
        return torch.add(F.linear(x, self.weight, self.bias), update, alpha=self.scale)

    def merged(self) -> nn.Linear:
        """Return an equivalent plain linear layer."""
        layer = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        with torch.no_grad():
            weight = self.weight.double() + self.scale * self.up.double() @ self.down.double()
        layer.weight, layer.bias = nn.Parameter(weight.to(self.weight.dtype)), self.bias
        return layer


def merge(model: nn.Module) -> nn.Module:
    """Merge all adapters into their linear layers, in place, and unfreeze all parameters."""
    if not replace_modules(model, lambda _, module: module.merged() if isinstance(module, LoraLinear) else None):
        raise UserError("this model has no adapters (the pass 'lora'), so there is nothing to merge")
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    recipe = getattr(model, "recipe", None)
    if recipe is not None:
        named = [(one if isinstance(one, str) else one["part"], one) for one in recipe["model"].pop("passes")]
        if left := [one for name, one in named if name != "lora"]:
            recipe["model"]["passes"] = left
    return model


def merge_run(run: str | Path, out: str | Path) -> None:
    """Write a copy of a run trained with LoRA, with its adapters merged."""
    run, out = Path(run), Path(out)
    must_be_new(out)
    model = restore(run)
    try:
        merge(model)
    except UserError as error:
        raise error.of(short(run)) from None
    save_derived(model, run, out)
