"""Recipes in a size for tests: as they are written, with fewer layers."""

from typing import Any

import regard
from regard.core import Model
from regard.files import recipe

SMALLEST = {"whisper": "mini"}  # of the others it is called tiny


def shallow(name: str, vocab: int = 61, overrides: list[str] | tuple[str, ...] = ()) -> Model:
    """Build a recipe with two layers, or with one more than its list of different layers has."""
    table = recipe.load(name, SMALLEST.get(name, "tiny"))
    _limit_depth(table["model"])
    return regard.build(table, vocab=vocab, overrides=overrides)


def _limit_depth(table: Any) -> None:
    if isinstance(table, dict) and isinstance(table.get("depth"), int):
        kinds = len(table.get("layer", [])) if isinstance(table.get("layer"), list) else 1
        table["depth"] = min(table["depth"], 2 if kinds < 2 else kinds + 1)
    for inner in table.values() if isinstance(table, dict) else table if isinstance(table, list) else ():
        _limit_depth(inner)
