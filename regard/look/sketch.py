"""A model without its weights: built in milliseconds whatever its size, to be counted, costed and drawn."""

from __future__ import annotations

import copy

from torch import nn

from regard.core import Model, Position, Stack, Towers, UserError, build
from regard.files.recipe import Recipe
from regard.memory import MetaWeights

SIDES = {"encoder-decoder": ("encoder", "decoder"), "towers": ("image", "text")}  # tables in [model], by kind


def sketch(recipe: Recipe) -> Model:
    """The model of a recipe, without weights. A part that needs their values to be built gets them."""
    try:
        with MetaWeights():
            return build(recipe)
    except UserError as error:
        if error.__cause__ is None:
            raise
        return build(recipe)


def count(*modules: nn.Module) -> int:
    """Parameters, shared ones once."""
    return sum({p: p.numel() for module in modules for p in module.parameters()}.values())


def parameters(recipe: Recipe) -> int:
    """Of the whole model. Each kind of layer is built once and counted as often as it stands in its stack."""
    once = copy.deepcopy(recipe)
    table = once["model"]
    tables = [table[side] for side in SIDES[table["kind"]]] if table.get("kind") in SIDES else [table]
    shared = [side.get("share") == "layers" for side in tables]
    for side in tables:
        side["share"] = "layers"
    try:
        model = sketch(once)
    except UserError:  # whatever is wrong is told about the recipe as it is written
        return count(sketch(recipe))
    total = count(model)
    for stack, is_shared in zip(stacks_of(model).values(), shared, strict=True):
        differs = type(stack.position).for_layer is not Position.for_layer
        if (
            differs
            or stack.shared
            or any(mixer.out_width != mixer.width for layer in stack._layers for mixer in layer.mixers)
        ):
            return count(sketch(recipe))  # layers have weights in common, or a width depends on the one before it
        if not is_shared:
            kinds = stack._layers[: stack.kinds]
            own = [count(stack.position, layer) - count(stack.position) for layer in kinds]
            total += sum(own[index % stack.kinds] for index in range(stack.kinds, len(stack._layers)))
    return total


def stacks_of(model: Model | Towers) -> dict[str, Stack]:
    """By side, in the order of the data."""
    if isinstance(model, Towers):
        return {side: one.stack for side, one in model.towers.items()}
    own = {"encoder" if model.kind == "encoder" else "decoder": model.stack}
    return own if model.encoder is None else {"encoder": model.encoder, **own}
