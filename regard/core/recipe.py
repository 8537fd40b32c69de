"""Builds, saves and loads models. files/recipe.py reads the recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model

from regard.errors import UserError, in_one_line, short
from regard.files.paths import check_files
from regard.files.recipe import Recipe, choose, display_name, load
from regard.memory import SkipInit, check_fits_memory, format_bytes, model_bytes
from regard.schema import SIZES, check_arguments, make

from .model import Model
from .towers import Towers

FILES = ("recipe.toml", "model.safetensors")  # of a saved model
MAX_COMPRESSION = 16  # how much smaller a weight may be in a file than in memory: two bits instead of float32


def build(
    recipe: str | Path | Recipe,
    size: str | None = None,
    vocab: int | tuple[int, int] | None = None,
    overrides: list[str] | tuple[str, ...] = (),
) -> Model:
    """Build the model of a recipe, a plain nn.Module. `model.recipe` is the complete recipe that was built."""
    made = choose(recipe, size, overrides) if isinstance(recipe, dict) else load(recipe, size, overrides)
    if vocab is not None:
        made["vocab"] = list(vocab) if isinstance(vocab, tuple) else vocab
    try:
        if "vocab" not in made:
            raise UserError("which vocabulary size? Give vocab=...")
        _check_vocab(made["vocab"])
        check_fits_memory("the model that it describes (--size names smaller ones)", model_bytes(made, _assemble))
        model = _assemble(made)
    except UserError as error:
        raise error.of("" if isinstance(recipe, dict) else display_name(recipe)) from error.__cause__
    model.recipe = made  # type: ignore[assignment]
    return model


def _check_vocab(vocab: Any) -> None:
    """Refuse a vocabulary that is too large; the model itself checks the rest."""
    for size in vocab if isinstance(vocab, list) else [vocab]:
        if isinstance(size, int) and size > SIZES["vocab"]:
            raise UserError(f"vocab must be at most {SIZES['vocab']:,}, not {size:,}")


def _assemble(recipe: Recipe) -> Any:
    """Build a Model, or Towers where the recipe's kind says so."""
    inherited = {"vocab": recipe["vocab"]}
    kind = Towers if recipe["model"].get("kind") == "towers" else Model
    check_arguments(kind, recipe["model"], inherited, "model")  # its messages name [model] already
    try:
        return make(kind, recipe["model"], inherited, "model")
    except UserError as error:
        raise error.inside("model") from error.__cause__


def save(model: Model, folder: str | Path) -> None:
    """Write recipe.toml and model.safetensors under other names and rename them, so that no file is half-written."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    check_files(folder, *(name + end for name in FILES for end in ("", ".part")))
    weights = folder / "model.safetensors.part"
    save_model(model, str(weights))
    text = folder / "recipe.toml.part"
    text.write_bytes(tomli_w.dumps(model.recipe).encode())  # type: ignore[arg-type]
    weights.replace(folder / "model.safetensors")
    text.replace(folder / "recipe.toml")


def check_weights_size(recipe: Path, weights: Path) -> None:
    """Refuse a recipe whose model is far larger than its weights file, before memory is allocated for it."""
    made, stored = load(recipe), weights.stat().st_size
    size = model_bytes(made, _assemble) if "vocab" in made else 0
    if size > MAX_COMPRESSION * stored:
        raise UserError(
            f"describes a model of {format_bytes(size)}, and {short(weights)} holds {format_bytes(stored)}: they do "
            "not belong together",
            file=short(recipe),
        )


def restore(folder: str | Path, device: str = "cpu") -> Model:
    """Load the model that `save` wrote."""
    folder = Path(folder)
    check_files(folder, *FILES)
    for name in FILES:
        if not (folder / name).is_file():
            raise UserError(f"{short(folder)} holds no {name}, so there is no model to load")
    weights = folder / "model.safetensors"
    check_weights_size(folder / "recipe.toml", weights)
    with SkipInit():
        model = build(folder / "recipe.toml")
    try:
        load_model(model, str(weights), device=device)
    except SafetensorError as error:
        raise UserError(f"is damaged or cut off: {in_one_line(error)}", file=short(weights)) from None
    except RuntimeError as error:
        raise UserError(f"does not fit its recipe: {in_one_line(error)}", file=short(weights)) from None
    return model.to(device)
