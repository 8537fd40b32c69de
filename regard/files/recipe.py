"""Find and read recipes, one published system per TOML file; choose a size and apply overrides."""

from __future__ import annotations

import copy
import os
import tomllib
from pathlib import Path
from typing import Any

from regard.errors import UserError, in_one_line, nearest, short
from regard.synonyms import SYNONYMS

from .reading import check_plain, check_type, read_text

FOLDER = Path(__file__).parent.parent / "recipes"
SECTIONS = ("title", "paper", "year", "idea", "golden", "vocab", "model", "objective", "size", "train", "decode")

Recipe = dict[str, Any]


def names() -> list[str]:
    """Return the names of the recipes that come with regard."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str | Path, size: str | None = None, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Return a recipe by name or from a file, in the given size, with overrides such as 'model.width=256' applied."""
    written = read(name)
    try:
        return choose(written, size, overrides)
    except UserError as error:
        raise error.of(display_name(name)) from None


def choose(recipe: Recipe, size: str | None = None, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Return a copy of a recipe in one of its sizes, with overrides applied and its entries checked."""
    recipe = copy.deepcopy(recipe)
    for key in recipe:
        if key not in SECTIONS:
            raise UserError(f"unknown entry '{key}'{nearest(str(key), SECTIONS)}")
    _has_model(recipe)
    known = recipe.pop("size", {})
    if not isinstance(known, dict) or not all(isinstance(table, dict) for table in known.values()):
        raise UserError("holds tables, such as [size.tiny.model]", ("size",))
    if size is not None:
        if size not in known:
            raise UserError(
                f"unknown size '{size}'{nearest(size, known)}" if known else f"has no sizes, so no '{size}'"
            )
        try:
            merge(recipe, known[size])
        except UserError as error:
            raise error.inside(size).inside("size") from None
    for text in overrides:
        override(recipe, text)
    _has_model(recipe)
    sections = dict.fromkeys(("objective", "train", "decode"), dict)
    for entry, kind in (sections | dict.fromkeys(("title", "paper", "idea"), str)).items():
        try:
            check_type(recipe.get(entry, kind()), kind)
        except UserError as error:
            raise error.inside(entry) from None
    return recipe


def _has_model(recipe: Recipe) -> None:
    if not isinstance(recipe.get("model"), dict):
        raise UserError("a recipe needs a [model]")


def sizes(name: str | Path) -> list[str]:
    """Return the names of the sizes of a recipe."""
    known = read(name).get("size", {})
    return list(known) if isinstance(known, dict) else []


def read(name: str | Path) -> Recipe:
    """Return a recipe as it is written, with all its sizes."""
    path = _find(name)
    text = read_text(path)
    try:
        written = tomllib.loads(text)
    # an integer of thousands of digits raises ValueError, not TOMLDecodeError
    except (ValueError, RecursionError) as error:
        raise UserError(f"is not TOML: {in_one_line(error)}", file=display_name(path)) from None
    try:
        check_plain(written)
    except UserError as error:
        raise error.of(display_name(path)) from None
    return written


def display_name(name: str | Path) -> str:
    """Return how messages name a recipe: by its name if it is built in, else by its file."""
    return Path(name).stem if is_built_in(name) else short(Path(name))


def is_built_in(name: str | Path) -> bool:
    """Return whether a recipe comes with regard, and is not a file of the user."""
    path = Path(name)
    return path.parent == FOLDER or not (path.suffix == ".toml" or os.sep in str(name))


def _find(name: str | Path) -> Path:
    path = Path(name)
    if path.suffix == ".toml" or os.sep in str(name):
        if not path.is_file():
            near = nearest(path.name, (p.name for p in path.parent.glob("*.toml")))
            raise UserError(f"there is no recipe file '{name}'{near}")
        return path
    built_in = FOLDER / f"{name}.toml"
    if not built_in.is_file():
        beside = f"; for a file, say './{name}.toml'" if Path(f"{name}.toml").is_file() else ""
        raise UserError(f"unknown recipe '{name}'{beside or nearest(str(name), names())}")
    return built_in


def merge(base: dict, over: dict) -> None:
    """Merge `over` into `base` recursively. A table is merged unless the new one names another part; all else is
    replaced.
    A table with numbers as keys changes the entries of a list: [size.tiny.model.layer.0.feedforward]."""
    for key, value in over.items():
        old = base.get(key)
        if isinstance(old, list) and isinstance(value, dict):
            for index, change in value.items():
                entry = old[_index(old, index, key)]
                if not isinstance(entry, dict) or not isinstance(change, dict):
                    raise UserError(f"'{key}.{index}' is not a table in both the recipe and the size")
                merge(entry, change)
        elif (
            isinstance(value, dict) and isinstance(old, dict) and value.get("part", old.get("part")) == old.get("part")
        ):
            merge(old, value)
        elif isinstance(value, dict) and isinstance(old, str) and "part" not in value:
            base[key] = {"part": old, **value}
        else:
            base[key] = copy.deepcopy(value)


def override(recipe: Recipe, text: str) -> None:
    """Apply an override such as 'model.layer.0.mixer.heads=2'. The value is read as TOML, or as a string if that
    fails."""
    path, equals, written = text.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys):
        raise UserError(f"override '{text}' should look like model.width=256")
    try:
        value = tomllib.loads(f"value = {written}")["value"]
    except (ValueError, RecursionError):
        value = written.strip()
    allowed = [key for key in SECTIONS if key != "size"]
    if keys[0] not in allowed:
        hint = nearest(keys[0], allowed)
        if len(keys) == 1 and keys[0] in SYNONYMS:
            hint = f"; did you mean '{SYNONYMS[keys[0]]}'?"
        elif len(keys) == 1:
            hint += "; settings are written train.KEY, model.KEY or decode.KEY (`regard settings` lists them)"
        raise UserError(f"override '{text}': no entry '{keys[0]}'{hint}")
    here: Any = recipe
    try:
        check_plain(value)
        for key in keys[:-1]:
            here = _enter(here, key)
        _set(here, keys[-1], value)
    except UserError as error:
        raise UserError(f"override '{text}': {error.message}") from None


def _enter(here: Any, key: str) -> Any:
    """Return the table or list at `key`, created where it is missing. The name of a part becomes a table of that
    part."""
    if isinstance(here, list):
        return here[_index(here, key, "the list")]
    if not isinstance(here, dict):
        raise UserError(f"there is no '{key}' inside {here!r}")
    if isinstance(here.get(key), str):
        here[key] = {"part": here[key]}
    return here.setdefault(key, {})


def _set(here: Any, key: str, value: Any) -> None:
    if isinstance(here, list):
        here[_index(here, key, "the list")] = value
    elif not isinstance(here, dict):
        raise UserError(f"there is no '{key}' inside {here!r}")
    elif isinstance(value, str) and isinstance(here.get(key), dict) and "part" in here[key]:
        here[key] = {"part": value} if here[key]["part"] != value else here[key]
    else:
        here[key] = value


def _index(here: list, key: str, what: str) -> int:
    if not (key.isascii() and key.isdigit()) or int(key) >= len(here):
        raise UserError(f"{what} has {len(here)} entries, counted from 0, and '{key}' is none of them")
    return int(key)
