"""Recipes: one published system per TOML file. Load, check, choose a size, override, build, save and load again."""

from __future__ import annotations

import copy
import os
import tomllib
from pathlib import Path
from typing import Any

import tomli_w
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model

from .errors import UserError, nearest
from .model import Model
from .parts import fit

FOLDER = Path(__file__).parent.parent / "recipes"
SECTIONS = ("title", "paper", "year", "idea", "golden", "vocab", "model", "objective", "size", "train", "decode")

Recipe = dict[str, Any]


def names() -> list[str]:
    """The recipes that come with regard."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str | Path, size: str | None = None, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """A recipe by name or from a file, in the given size, with overrides such as 'model.width=256' applied."""
    path = _find(name)
    try:
        recipe = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}") from None
    try:
        for key in recipe:
            if key not in SECTIONS:
                raise UserError(f"unknown entry '{key}'{nearest(key, SECTIONS)}")
        if not isinstance(recipe.get("model"), dict):
            raise UserError("a recipe needs a [model]")
        sizes = recipe.pop("size", {})
        if size is not None:
            if size not in sizes:
                raise UserError(f"unknown size '{size}'{nearest(size, sizes)}")
            merge(recipe, sizes[size])
        for text in overrides:
            override(recipe, text)
    except UserError as error:
        raise error.inside(str(path)) from None
    return recipe


def sizes(name: str | Path) -> list[str]:
    return list(tomllib.loads(_find(name).read_text(encoding="utf-8")).get("size", {}))


def _find(name: str | Path) -> Path:
    path = Path(name)
    if path.suffix == ".toml" or os.sep in str(name):
        if not path.is_file():
            raise UserError(f"there is no recipe file '{name}'")
        return path
    built_in = FOLDER / f"{name}.toml"
    if not built_in.is_file():
        raise UserError(f"unknown recipe '{name}'{nearest(str(name), names())}")
    return built_in


def merge(base: dict, over: dict) -> None:
    """Deep: tables are merged, unless the new one names another part; everything else is replaced.
    A table with numbers as keys changes the entries of a list: [size.tiny.model.layer.0.feedforward]."""
    for key, value in over.items():
        old = base.get(key)
        if isinstance(old, list) and isinstance(value, dict):
            entries = {int(_index(old, index, f"{key}.{index}")): change for index, change in value.items()}
            for index, change in entries.items():
                merge(old[index], change)
        elif (
            isinstance(value, dict) and isinstance(old, dict) and value.get("part", old.get("part")) == old.get("part")
        ):
            merge(old, value)
        elif isinstance(value, dict) and isinstance(old, str) and "part" not in value:
            base[key] = {"part": old, **value}
        else:
            base[key] = copy.deepcopy(value)


def override(recipe: Recipe, text: str) -> None:
    """'model.layer.0.mixer.heads=2': the value is read as TOML, and as plain words when that fails."""
    path, equals, written = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise UserError(f"override '{text}' should look like model.width=256")
    try:
        value = tomllib.loads(f"value = {written}")["value"]
    except tomllib.TOMLDecodeError:
        value = written.strip()
    here: Any = recipe
    for depth, key in enumerate(keys[:-1]):
        here = _enter(here, key, text, ".".join(keys[: depth + 1]), create=depth > 0)
    last = keys[-1]
    if isinstance(here, list):
        index = _index(here, last, text)
        here[index] = value
    elif isinstance(here, dict):
        if len(keys) == 1 and last not in SECTIONS:
            raise UserError(f"override '{text}': no entry '{last}'{nearest(last, SECTIONS)}")
        if isinstance(value, str) and isinstance(here.get(last), dict) and "part" in here[last]:
            value = {"part": value} if here[last]["part"] != value else here[last]
        here[last] = value
    else:
        raise UserError(f"override '{text}': '{'.'.join(keys[:-1])}' is not a table")


def _enter(here: Any, key: str, text: str, path: str, create: bool) -> Any:
    if isinstance(here, list):
        return here[_index(here, key, text)]
    if not isinstance(here, dict):
        raise UserError(f"override '{text}': '{path}' is not a table")
    if key not in here:
        if not create and key not in SECTIONS:
            raise UserError(f"override '{text}': no entry '{key}'{nearest(key, here)}")
        here[key] = {}
    elif isinstance(here[key], str) and path != "model":
        here[key] = {"part": here[key]}
    return here[key]


def _index(here: list, key: str, text: str) -> int:
    if not key.isdigit() or int(key) >= len(here):
        raise UserError(f"override '{text}': there are {len(here)} entries, counted from 0, so '{key}' is none of them")
    return int(key)


def build(
    recipe: str | Path | Recipe,
    size: str | None = None,
    vocab: int | tuple[int, int] | None = None,
    overrides: list[str] | tuple[str, ...] = (),
) -> Model:
    """A plain nn.Module from a recipe. `model.recipe` says exactly what was built."""
    made = load(recipe, size, overrides) if not isinstance(recipe, dict) else copy.deepcopy(recipe)
    for text in overrides if isinstance(recipe, dict) else ():
        override(made, text)
    if vocab is not None:
        made["vocab"] = vocab if isinstance(vocab, int) else list(vocab)
    try:
        if "vocab" not in made:
            raise UserError("which vocabulary size? Give vocab=...")
        model = Model(**fit(Model, made["model"], {"vocab": made["vocab"]}, "model"))
    except UserError as error:
        where = str(_find(recipe)) if not isinstance(recipe, dict) else ""
        raise (error.inside(where) if where else error) from None
    model.recipe = made  # type: ignore[assignment]
    return model


def save(model: Model, folder: str | Path) -> None:
    """recipe.toml and model.safetensors; written beside and renamed, so that a folder is never half-written."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "model.safetensors.part"
    save_model(model, str(weights))
    text = folder / "recipe.toml.part"
    text.write_bytes(tomli_w.dumps(model.recipe).encode())  # type: ignore[arg-type]
    weights.replace(folder / "model.safetensors")
    text.replace(folder / "recipe.toml")


def restore(folder: str | Path, device: str = "cpu") -> Model:
    """The model that `save` wrote."""
    folder = Path(folder)
    for name in ("recipe.toml", "model.safetensors"):
        if not (folder / name).is_file():
            raise UserError(f"{folder} holds no {name}, so there is no model to load")
    model = build(load(folder / "recipe.toml"))
    try:
        load_model(model, str(folder / "model.safetensors"), device=device)
    except (SafetensorError, RuntimeError) as error:
        first = str(error).strip().splitlines()
        raise UserError(f"{folder / 'model.safetensors'} does not fit its recipe: {' '.join(first)[:300]}") from None
    return model.to(device)
