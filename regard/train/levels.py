"""How high a weight stands in a model, so that the lower ones can learn slower, or not at all.

    embeddings 0, then layer by layer 1, 2, ... of its stack; heads and last norms stand above all layers
    rate of a layer = decay^(layers above it + 1), of the embeddings one power more

Howard & Ruder 2018, "Universal Language Model Fine-tuning for Text Classification", arXiv:1801.06146.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from regard.core import UserError
from regard.passes.lora import LoraLinear

LAYER = re.compile(r"(.*?)\blayers\.(\d+)\.")


class Level(NamedTuple):
    """above: layers of its stack that stand above it, itself among them; 0: it stands above all layers."""

    height: int
    above: int


def levels(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Level]]:
    """Of every weight; one that has several names comes with each."""
    named = list(model.named_parameters(remove_duplicate=False))
    places = {name: found for name, _ in named if (found := LAYER.match(name)) and not name.startswith("head.")}
    depths: dict[str, int] = {}
    for place in places.values():
        depths[place[1]] = max(depths.get(place[1], 0), int(place[2]) + 1)
    for name, parameter in named:
        if name in places:
            height, depth = int(places[name][2]) + 1, depths[places[name][1]]
            yield name, parameter, Level(height, depth - height + 1)
        elif "embed" in name.partition(".")[0] or ".position." in name:
            yield name, parameter, Level(0, max(depths.values(), default=0) + 1)
        else:
            depth = max(depths.values(), default=0)
            yield name, parameter, Level(depth + 1, 0)


def rates(model: nn.Module, decay: float, head: float) -> dict[str, float]:
    """The share of the learning rate that each weight learns at, by any of its names. One that stands at several
    heights, such as a shared layer, learns as the highest of them."""
    best: dict[int, float] = {}
    for name, parameter, level in levels(model):
        share = decay**level.above * (head if name.startswith("head.") else 1.0)
        best[id(parameter)] = max(best.get(id(parameter), 0.0), share)
    return {name: best[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}


def freeze(model: nn.Module, most: int | str) -> None:
    """most: so many of the lowest layers of every stack, embeddings included; embed: those alone; body: all but the
    head. 0: nothing. What is frozen gets no gradient, and no optimizer holds anything for it."""
    if most == 0:
        return
    every = list(levels(model))
    depth = max((level.height for name, _, level in every if LAYER.match(name)), default=0)
    if isinstance(most, int) and most > depth:
        raise UserError(f"train.freeze is {most}, and this model has {depth} layers: say body for all of them")
    heights: dict[int, int] = {}
    for _, parameter, level in every:
        heights[id(parameter)] = max(heights.get(id(parameter), 0), level.height)
    if isinstance(most, int) and any(heights[id(p)] != level.height for name, p, level in every if LAYER.match(name)):
        raise UserError("train.freeze counts layers, and in this model they are one and the same: say embed or body")
    for name, parameter, level in every:
        held = not name.startswith("head.") if most == "body" else level.height <= (0 if most == "embed" else int(most))
        if held:
            parameter.requires_grad_(False)
    small = [module.up for module in model.modules() if isinstance(module, LoraLinear)]
    if small and not any(one.requires_grad for one in small):
        raise UserError(f"train.freeze is {most}, and none of LoRA's small maps would learn: leave out one of the two")
