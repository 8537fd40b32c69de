"""LoRA: a trained map stays as it is, and a small one beside it learns what a new task needs.

    y = W x + b + (alpha / rank) U D x          D (rank, in) at random, U (out, rank) zero at first

At first the model is the very same. In the end W + (alpha / rank) U D is one map again: see `merge`.

Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models", arXiv:2106.09685.
"""

from __future__ import annotations

import math
from fnmatch import fnmatch
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Dropout, Pass, UserError, restore
from regard.core.passes import exchange
from regard.errors import short
from regard.files.paths import must_be_new
from regard.ops.dispatch import is_plain_linear
from regard.runs.folder import save_derived

LETTERS = {"q": "q", "k": "k", "v": "v", "o": "out"}  # maps of an attention


class Lora(Pass):
    """Adds such small maps to a model's linear layers. Nothing else of it learns.

    rank:    channels of a small map.
    alpha:   what it counts, before it is divided by the rank.
    dropout: of what enters it.
    on:      letters of 'qkvo', those maps of every attention; or a list of names of maps, with * for anything.
    learn:   names of weights that learn beside the small maps, with * for anything, such as those of a new head.
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
        if isinstance(on, str) and (not on or set(on) - set(LETTERS)):
            raise UserError(f"on takes letters of 'qkvo', or a list of names such as ['*.feedforward.*'], not '{on}'")
        self.rank, self.alpha, self.dropout, self.on, self.learn = rank, alpha, dropout, on, tuple(learn or ())

    def __call__(self, model: nn.Module) -> None:
        attentions = {path for path, m in model.named_modules() if isinstance(getattr(m, "q", None), nn.Linear)}

        def chosen(path: str) -> bool:
            if not isinstance(self.on, str):
                return any(fnmatch(path, name) for name in self.on)
            parent, _, name = path.rpartition(".")
            return parent in attentions and name in [LETTERS[letter] for letter in self.on]

        def change(path: str, module: nn.Module) -> nn.Module | None:
            if not is_plain_linear(module) or not chosen(path):
                return None
            return LoraLinear.of(module, self.rank, self.alpha, self.dropout)

        if not exchange(model, change):
            raise UserError(f"there is no linear layer to add a small map to: on = {self.on!r} names none")
        small = {id(p) for m in model.modules() if isinstance(m, LoraLinear) for p in (m.down, m.up)}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) not in small and not any(fnmatch(name, pattern) for pattern in self.learn):
                parameter.requires_grad_(False)


class LoraLinear(nn.Linear):
    """A linear map and a small one beside it. The weights keep the names that they have in a plain map."""

    def __init__(self, in_features: int, out_features: int, bias: bool, rank: int, alpha: float, dropout: float):
        super().__init__(in_features, out_features, bias, device="meta")
        self.down = nn.Parameter(torch.empty(rank, in_features))
        self.up = nn.Parameter(torch.zeros(out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))
        self.scale, self.drop = alpha / rank, Dropout(dropout)

    @classmethod
    def of(cls, linear: nn.Linear, rank: int, alpha: float, dropout: float) -> LoraLinear:
        """With the very weights of a plain map."""
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, rank, alpha, dropout)
        made.weight, made.bias = linear.weight, linear.bias
        made.down.data, made.up.data = made.down.data.to(linear.weight), made.up.data.to(linear.weight)
        return made

    def forward(self, x: Tensor) -> Tensor:
        small = F.linear(F.linear(self.drop(x), self.down), self.up)
        return torch.add(F.linear(x, self.weight, self.bias), small, alpha=self.scale)

    def merged(self) -> nn.Linear:
        """One map that does the same."""
        made = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        with torch.no_grad():
            whole = self.weight.double() + self.scale * self.up.double() @ self.down.double()
        made.weight, made.bias = nn.Parameter(whole.to(self.weight.dtype)), self.bias
        return made


def merge(model: nn.Module) -> nn.Module:
    """The same model, every small map added to the one beside it: plain, and all of it free to learn. In place."""
    if not exchange(model, lambda _, module: module.merged() if isinstance(module, LoraLinear) else None):
        raise UserError("this model has no small maps beside its own (the pass 'lora'), so there is nothing to merge")
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    recipe = getattr(model, "recipe", None)
    if recipe is not None:
        named = [(one if isinstance(one, str) else one["part"], one) for one in recipe["model"].pop("passes")]
        if left := [one for name, one in named if name != "lora"]:
            recipe["model"]["passes"] = left
    return model


def merge_run(run: str | Path, out: str | Path) -> None:
    """A run that was trained with LoRA as a plain one: a new folder that answers as the run does."""
    run, out = Path(run), Path(out)
    must_be_new(out)
    model = restore(run)
    try:
        merge(model)
    except UserError as error:
        raise error.of(short(run)) from None
    save_derived(model, run, out)
