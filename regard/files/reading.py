"""Read JSON and TOML files that anybody may have written: bounded in size, and checked against a schema.

A schema is a Python type: `read_json(path, Schema)` refuses a file whose entries do not have the types of the TypedDict
`Schema`, and says which entry, what it holds and what it should hold.
"""

from __future__ import annotations

import json
import math
import types
import typing
from functools import cache
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple

from regard.errors import UserError, in_one_line, short, shown

MAX_BYTES = 1 << 27  # the most bytes of a JSON or TOML file
MAX_DEPTH = 40  # levels of nested tables


class Range(NamedTuple):
    """The range of a number: Annotated[int, Range(1)]."""

    least: float
    most: float = math.inf


Natural = Annotated[int, Range(0)]
Positive = Annotated[int, Range(1)]
NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", type(None): "null"}


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file of bounded size."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{short(path)} has {path.stat().st_size:,} bytes, and {MAX_BYTES:,} are read at most")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{short(path.parent)} holds no {path.name}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or in_one_line(error)
        raise UserError(f"{short(path)} cannot be read: {reason}") from None


def read_json(path: Path, schema: Any = dict) -> Any:
    """Return the contents of a JSON file, checked against a type; by default, a table."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{short(path)} cannot be read: {in_one_line(error)}") from None
    if (schema is dict or typing.is_typeddict(schema)) and not isinstance(value, dict):
        raise UserError(f"{short(path)} is no table")
    try:
        check_plain(value)
        check_type(value, schema)
    except UserError as error:
        raise error.of(short(path)) from None
    return value


def npy_bytes(file: IO[bytes]) -> int:
    """Return the size in bytes of the array that the header of an .npy file announces."""
    from numpy.lib import format as npy

    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(file)
    return math.prod(shape) * dtype.itemsize


def check_plain(value: Any, depth: int = 0) -> None:
    """Refuse integers of more than 64 bits and deeply nested tables, so that no later code has to handle them."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UserError("holds a whole number of more than 64 bits")
    if not isinstance(value, dict | list):
        return
    if depth == MAX_DEPTH:
        raise UserError(f"holds tables or lists that are nested more than {MAX_DEPTH} deep")
    for one in value.values() if isinstance(value, dict) else value:
        check_plain(one, depth + 1)


def check_type(value: Any, schema: Any) -> None:
    """Refuse a value that does not have a type. The type is made of int, float, str, bool, None, Any, list[...],
    dict[str, ...], unions, TypedDicts, dataclasses, and Annotated numbers with a Range. A float is finite."""
    bare, bounds = _split_annotated(schema)
    if bare is Any:
        return
    if isinstance(bare, types.UnionType) or typing.get_origin(bare) is typing.Union:
        return _check_union(value, typing.get_args(bare))
    origin = typing.get_origin(bare) or bare
    if not _has_type(value, origin):
        raise UserError(f"is {shown(value)}, and should be {type_name(bare)}")
    if bounds is not None and not bounds.least <= value <= bounds.most:
        most = "" if bounds.most == math.inf else f" and at most {bounds.most:,}"
        raise UserError(f"is {shown(value)}, and should be at least {bounds.least:,}{most}")
    inner = typing.get_args(bare)
    if origin is list and inner:
        for number, one in enumerate(value):
            _check_entry(f"[{number}]", one, inner[0])
    elif origin is dict and inner:
        for key, one in value.items():
            _check_entry(str(key), one, inner[1])
    elif _has_fields(origin):
        for key in sorted(getattr(origin, "__required_keys__", ())):
            if key not in value:
                raise UserError(f"has no '{key}'")
        for key, hint in _fields(origin).items():
            if key in value:
                _check_entry(key, value[key], hint)


def _check_union(value: Any, kinds: tuple[Any, ...]) -> None:
    """Check against the first member of a union that a value resembles, whose error helps most."""
    for kind in kinds:
        bare = _split_annotated(kind)[0]
        if _has_type(value, typing.get_origin(bare) or bare):
            return check_type(value, kind)
    raise UserError(f"is {shown(value)}, and should be {' or '.join(map(type_name, kinds))}")


def _check_entry(entry: str, value: Any, schema: Any) -> None:
    try:
        check_type(value, schema)
    except UserError as error:
        raise error.inside(entry) from None


def _split_annotated(schema: Any) -> tuple[Any, Range | None]:
    if typing.get_origin(schema) is not Annotated:
        return schema, None
    bare, *more = typing.get_args(schema)
    return bare, next((one for one in more if isinstance(one, Range)), None)


@cache
def _fields(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _has_fields(kind: Any) -> bool:
    return typing.is_typeddict(kind) or hasattr(kind, "__dataclass_fields__")


def _has_type(value: Any, kind: Any) -> bool:
    """Return whether a value has a type, without looking at its contents."""
    if kind is Any:
        return True
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is None or kind is type(None):
        return value is None
    return isinstance(value, dict if _has_fields(kind) else kind)


def type_name(schema: Any) -> str:
    """Return the name of a type for a message."""
    bare = _split_annotated(schema)[0]
    origin = typing.get_origin(bare) or bare
    if origin is list:
        return "a list"
    return NAMES.get(type(None) if bare is None else origin, "a table")
