"""Load datasets from the Hugging Face hub by name; this needs the package `datasets` and a network."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

from regard.core import UserError
from regard.errors import in_one_line, nearest

from .columns import ColumnSelector
from .forms import NumberedRow

NAME = re.compile(r"(hf:)?([A-Za-z0-9][\w.-]*(?:/[\w.-]+)?)(?::([\w.-]+))?")
PARTS = {"train": ("train",), "dev": ("validation", "valid", "dev", "val"), "test": ("test",)}


class Hub:
    """One split of a dataset, as the rows of a table."""

    unit, documents = "row", True

    def __init__(self, name: str, rows: Any, columns: tuple[str, ...], wanted: int, max_chars: int):
        self.name, self.data = name, rows
        try:
            first = next(iter(rows), None)
            if first is None:
                raise UserError("holds no record")
            self.pick = ColumnSelector(_flatten_translation(first, columns), False, columns, wanted, max_chars)
        except UserError as error:
            raise error.of(name) from None

    def rows(self) -> Iterator[NumberedRow]:
        for number, record in enumerate(self.data, 1):
            yield number, self.pick(record)

    def key(self) -> list[Any]:
        return [self.name, getattr(self.data, "_fingerprint", ""), self.pick.wanted]


def _flatten_translation(record: dict[str, Any], columns: tuple[str, ...]) -> dict[str, Any]:
    """Return the languages of the usual {"translation": {"en": ..., "de": ...}} as columns."""
    inner = record.get("translation")
    if columns or not isinstance(inner, dict):
        return record
    return {f"translation.{language}": text for language, text in inner.items()}


def load_splits(text: str, columns: tuple[str, ...], wanted: int, max_chars: int, hint: str = "") -> dict[str, Hub]:
    """Return the splits of the dataset `name`, `owner/name` or `name:configuration`. hint: a file that may be meant."""
    _, name, configuration = NAME.fullmatch(text).groups()  # type: ignore[union-attr]
    try:
        library = importlib.import_module("datasets")
    except ImportError:
        raise UserError(
            f"there is no file or folder '{text}'{hint or ','} and if it is the name of a Hugging Face dataset, "
            "that needs the package 'datasets': pip install datasets"
        ) from None
    try:
        splits = library.load_dataset(name, configuration)
    except Exception as error:  # anything that the network or the library may raise
        why = in_one_line(error)
        raise UserError(
            f"there is no file or folder '{text}'{hint or ','} and no dataset of that name: {why}"
        ) from None
    parts = {}
    for part, names in PARTS.items():
        key = next((key for key in names if key in splits), None)
        if key is not None:
            parts[part] = Hub(f"{text} ({key})", splits[key], columns, wanted, max_chars)
    if "train" not in parts:
        raise UserError(f"the dataset '{text}' has no part 'train'{nearest('train', splits)}")
    return parts
