"""From a name in a recipe to the class in parts/, and from a table of arguments to an instance.

The file name is the recipe name is the class name. The constructor is the schema: what it does not take is refused.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
import typing
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from .errors import UserError, nearest

T = TypeVar("T")

BUILT_IN = Path(__file__).parent.parent / "parts"
added: list[Path] = []  # folders of the user's own parts


def add_folder(folder: str | Path) -> None:
    """Look for parts in this folder too: `folder/name.py`, or `folder/mixers/name.py` as in regard's own."""
    path = Path(folder).resolve()
    if not path.is_dir():
        raise UserError(f"there is no folder '{folder}' to take parts from")
    if path not in added:
        added.append(path)


def files(contract: type) -> dict[str, Path]:
    """The files that hold parts of this kind, by recipe name."""
    found: dict[str, Path] = {}
    for root in (BUILT_IN, *added):
        folders = [root / name for name in contract.folder] + ([root] if root != BUILT_IN else [])  # type: ignore[attr-defined]
        for folder in folders:
            for path in sorted(folder.glob("[a-z]*.py")):
                if found.setdefault(path.stem, path) != path and root != folder:
                    raise UserError(f"two parts are called '{path.stem}': {found[path.stem]} and {path}; rename yours")
    return found


def names(contract: type) -> list[str]:
    """The names that a recipe may use for this kind of part."""
    return sorted(
        name for name, path in files(contract).items() if path.is_relative_to(BUILT_IN) or _holds(contract, path)
    )


def find(contract: type[T], name: str) -> type[T]:
    """The class that a recipe calls `name`."""
    known = files(contract)
    kind = contract.__name__.lower()
    if not isinstance(name, str) or name not in known:
        raise UserError(f"unknown {kind} '{name}'{nearest(str(name), known)}")
    module = _load(known[name])
    wanted = name.replace("_", "")
    for thing in vars(module).values():
        if inspect.isclass(thing) and thing.__name__.lower().rstrip("_") == wanted and issubclass(thing, contract):
            return thing
    raise UserError(
        f"{known[name]} should define a class {name.title().replace('_', '')} that is a {contract.__name__}"
    )


@lru_cache
def _load(path: Path) -> types.ModuleType:
    if path.is_relative_to(BUILT_IN):
        return importlib.import_module(".".join(("regard.parts", *path.relative_to(BUILT_IN).with_suffix("").parts)))
    name = f"regard_parts_of_user.{path.parent.name}_{path.stem}_{abs(hash(path))}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except Exception as error:  # whatever a user's file may do when it is run
        del sys.modules[name]
        line = next((f.lineno for f in reversed(inspect.trace()) if f.filename == str(path)), None)
        where = f"{path}, line {line}" if line else str(path)
        raise UserError(f"{where} does not load: {type(error).__name__}: {error}") from error
    return module


def _holds(contract: type, path: Path) -> bool:
    wanted = path.stem.replace("_", "")
    return any(
        inspect.isclass(thing) and thing.__name__.lower().rstrip("_") == wanted and issubclass(thing, contract)
        for thing in vars(_load(path)).values()
    )


def part(contract: type[T], spec: Any, **inherited: Any) -> T:
    """An instance of a part: from a name, a table { part = name, ... }, or as it is when it is one already.

    `inherited` reaches the constructor only where it asks for a parameter of that name and the table is silent.
    """
    slot = contract.__name__.lower()
    if isinstance(spec, contract):
        return spec
    try:
        if isinstance(spec, str) and hasattr(contract, "parse"):
            return contract.parse(spec)  # type: ignore[attr-defined]
        if isinstance(spec, str):
            spec = {"part": spec}
        if not isinstance(spec, dict):
            raise UserError(f"a {slot} is a name or a table with 'part', not {spec!r}")
        if "part" not in spec:
            raise UserError(f"which {slot}? The table needs 'part = ...'{nearest('', files(contract))}")
        given = {key: value for key, value in spec.items() if key != "part"}
        kind = find(contract, spec["part"])
        return kind(**fit(kind, given, inherited, spec["part"]))
    except UserError as error:
        raise error.inside(slot) from None


def fit(kind: type, given: dict[str, Any], inherited: dict[str, Any], name: str | None = None) -> dict[str, Any]:
    """The arguments for a constructor, checked against its signature."""
    name = name or kind.__name__.lower()
    wanted = {
        k: p for k, p in inspect.signature(kind).parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    for key in given:
        if key not in wanted:
            raise UserError(f"{name} has no '{key}'{nearest(key, wanted)}")
    hints = _hints(kind)
    arguments = {key: value for key, value in inherited.items() if key in wanted} | given
    for key, parameter in wanted.items():
        if key in arguments:
            _check_type(name, key, arguments[key], hints.get(key))
        elif parameter.default is parameter.empty:
            raise UserError(f"{name} needs '{key}'{_kind_of(hints.get(key))}")
    return arguments


@lru_cache
def _hints(kind: type) -> dict[str, Any]:
    target = kind if hasattr(kind, "__dataclass_fields__") else kind.__init__  # type: ignore[misc]
    return typing.get_type_hints(target)


def _kinds(hint: Any) -> tuple:
    return (
        typing.get_args(hint)
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        else (hint,)
    )


def _kind_of(hint: Any) -> str:
    plain = [kind.__name__ for kind in _kinds(hint) if kind in (int, float, str, bool)]
    return f" ({' or '.join(plain)})" if plain else ""


def _check_type(name: str, key: str, value: Any, hint: Any) -> None:
    """Numbers, words and switches are told apart; anything richer is the constructor's to check."""
    kinds = _kinds(hint)
    if hint is None or not all(kind in (int, float, str, bool, type(None)) for kind in kinds):
        return
    right = (
        (value is None and type(None) in kinds)
        or (isinstance(value, bool) and bool in kinds)
        or (isinstance(value, int) and not isinstance(value, bool) and (int in kinds or float in kinds))
        or (isinstance(value, float) and float in kinds)
        or (isinstance(value, str) and str in kinds)
    )
    if not right:
        raise UserError(
            f"{name}.{key} must be{_kind_of(hint)}, not {value!r}".replace("be (", "be ").replace("),", ",")
        )
