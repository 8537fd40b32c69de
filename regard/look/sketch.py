"""Models without weights: built in milliseconds at any size, to count their parameters and costs and to draw them."""

from __future__ import annotations

import copy

from torch import nn

from regard.core import Model, Position, Stack, Towers, UserError, build
from regard.files.recipe import Recipe
from regard.memory import MetaWeights

SIDES = {"encoder-decoder": ("encoder", "decoder"), "towers": ("image", "text")}  # tables in [model], by kind


def build_without_weights(recipe: Recipe) -> Model:
    """Build the model of a recipe without weights; with weights if a part needs their values to be built."""
    try:
        with MetaWeights():
            return build(recipe)
    except UserError as error:
        if error.__cause__ is None:
            raise
        return build(recipe)


def count_parameters(*modules: nn.Module) -> int:
    """Return the number of parameters, counting shared ones once."""
    return sum({p: p.numel() for module in modules for p in module.parameters()}.values())


def parameters_of_recipe(recipe: Recipe) -> int:
    """Return the number of parameters of a recipe. Each kind of layer is built once and counted as often as it
    occurs."""
    shortened = copy.deepcopy(recipe)
    table = shortened["model"]
    tables = [table[side] for side in SIDES[table["kind"]]] if table.get("kind") in SIDES else [table]
    shared = [side.get("share") == "layers" for side in tables]
    for side in tables:
        side["share"] = "layers"
    try:
        model = build_without_weights(shortened)
    except UserError:  # so that the error is about the recipe as written
        return count_parameters(build_without_weights(recipe))
    total = count_parameters(model)
    for stack, is_shared in zip(stacks_of(model).values(), shared, strict=True):
        differs = type(stack.position).for_layer is not Position.for_layer
        if (
            differs
            or stack.shared
            or any(mixer.out_width != mixer.width for layer in stack._layers for mixer in layer.mixers)
        ):
            return count_parameters(
                build_without_weights(recipe)
            )  # layers share weights, or their width depends on earlier layers
        if not is_shared:
            kinds = stack._layers[: stack.kinds]
            own = [count_parameters(stack.position, layer) - count_parameters(stack.position) for layer in kinds]
            total += sum(own[index % stack.kinds] for index in range(stack.kinds, len(stack._layers)))
    return total


def stacks_of(model: Model | Towers) -> dict[str, Stack]:
    """Return the stacks by side, in the order of the data."""
    if isinstance(model, Towers):
        return {side: one.stack for side, one in model.towers.items()}
    own = {"encoder" if model.kind == "encoder" else "decoder": model.stack}
    return own if model.encoder is None else {"encoder": model.encoder, **own}
