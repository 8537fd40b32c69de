"""Layer-wise learning rates and freezing: the height of each weight in the model, so that lower ones learn slower.

    height: embeddings 0, then 1, 2, ... for the layers of a stack; heads and last norms are above all layers
    learning rate of a layer = decay^(layers above it + 1), of the embeddings one power more

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
    """Where a weight is in its model.

    height: 0 for embeddings, then the number of the layer from 1 on.
    above:  layers of its stack from its own to the top; 0: the weight is above all layers.
    """

    height: int
    above: int


def levels(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Level]]:
    """Yield name, parameter and level of every weight. A tied weight comes once for each of its names."""
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


def lr_scales(model: nn.Module, decay: float, head: float) -> dict[str, float]:
    """Return the factor of each weight's learning rate, under each of its names. A weight at several heights, such as a
    shared layer, takes the largest factor.

    decay: factor per layer.
    head:  factor of the head.
    """
    best: dict[int, float] = {}
    for name, parameter, level in levels(model):
        scale = decay**level.above * (head if name.startswith("head.") else 1.0)
        best[id(parameter)] = max(best.get(id(parameter), 0.0), scale)
    return {name: best[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}


def freeze(model: nn.Module, what: int | str) -> None:
    """Freeze weights: they get no gradient and no optimizer state.

    what: a number of the lowest layers of every stack, embeddings included; "embed": the embeddings alone; "body": all
          but the head; 0: nothing.
    """
    if what == 0:
        return
    every = list(levels(model))
    depth = max((level.height for name, _, level in every if LAYER.match(name)), default=0)
    if isinstance(what, int) and what > depth:
        raise UserError(f"train.freeze is {what}, and this model has {depth} layers: say body for all of them")
    heights: dict[int, int] = {}
    for _, parameter, level in every:
        heights[id(parameter)] = max(heights.get(id(parameter), 0), level.height)
    if isinstance(what, int) and any(heights[id(p)] != level.height for name, p, level in every if LAYER.match(name)):
        raise UserError("train.freeze counts layers, and the layers of this model share weights: say embed or body")
    for name, parameter, level in every:
        frozen = (
            not name.startswith("head.") if what == "body" else level.height <= (0 if what == "embed" else int(what))
        )
        if frozen:
            parameter.requires_grad_(False)
    lora = [module.up for module in model.modules() if isinstance(module, LoraLinear)]
    if lora and not any(one.requires_grad for one in lora):
        raise UserError(f"train.freeze is {what}, which freezes all LoRA matrices, too: leave out --freeze or --lora")
