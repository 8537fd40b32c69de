"""Finds the class in parts/ for a name in a recipe, and makes an instance from a table of arguments.

File name, recipe name and class name agree. The constructor is the schema: other arguments are refused.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
import types
import typing
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from regard.errors import UserError, in_one_line, nearest, nearest_key, short, shown

T = TypeVar("T")

REGARD = Path(__file__).parent
BUILT_IN = REGARD / "parts"
ASSEMBLED = ("place", "branches")  # arguments given by the assembly, never by a recipe
ENCLOSING = ("width", "dim", "vocab")  # arguments that a table may repeat but not change
SETTINGS = ("model", "train", "decode", "objective")  # sections of a recipe with settings
SIZES = {  # arguments that are at least 1, and their maxima
    "width": 1 << 17, "depth": 10_000, "heads": 1 << 13, "kv_heads": 1 << 13, "dim": 1 << 17, "hidden": 1 << 20,
    "vocab": 1 << 24, "experts": 1 << 13, "length": 1 << 24, "classes": 1 << 24,
    "max_distance": 1 << 20, "buckets": 1 << 24,
}  # fmt: skip
MAX_INT = (1 << 31) - 1  # of any other whole number
WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a word",
    bool: "true or false",
    dict: "a table",
    list: "a list",
}

user_folders: list[Path] = []  # folders of the user's own parts


def add_folder(folder: str | Path) -> None:
    """Look for parts in this folder too: `folder/name.py`, or `folder/mixers/name.py` as in regard's own."""
    path = Path(folder).resolve()
    if not path.is_dir():
        raise UserError(f"there is no folder '{folder}' to take parts from")
    if path not in user_folders:
        user_folders.append(path)


def folders(contract: type) -> list[Path]:
    """Return the folders with parts of this kind, regard's own first. A user's folder may hold all kinds together."""
    kinds: tuple[str, ...] = contract.folder  # type: ignore[attr-defined]
    own = [REGARD / getattr(contract, "root", BUILT_IN.name) / name for name in kinds]
    return own + [place for root in user_folders for place in (*(root / name for name in kinds), root)]


def files(contract: type) -> dict[str, Path]:
    """Return the files with parts of this kind by recipe name; in a folder of all kinds, every candidate."""
    found: dict[str, Path] = {}
    for folder in folders(contract):
        for path in sorted(folder.glob("[a-z]*.py")):
            found.setdefault(path.stem, path)
    return found


def names(contract: type) -> list[str]:
    """Return the names that a recipe may use for this kind of part."""
    return sorted(
        name for name, path in files(contract).items() if path.is_relative_to(REGARD) or class_in(path, contract)
    )


def find(contract: type[T], name: str) -> type[T]:
    """Return the class that a recipe calls `name`."""
    return _find(contract, str(name), tuple(user_folders))  # type: ignore[arg-type]


@cache
def _find(contract: Any, name: str, roots: tuple[Path, ...]) -> Any:
    paths = [folder / f"{name}.py" for folder in dict.fromkeys(folders(contract)) if name.isidentifier()]
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise UserError(f"unknown {contract.__name__.lower()} '{name}'{nearest(name, files(contract))}")
    path = paths[0]
    for other in paths[1:]:
        if other.parent not in roots or class_in(other, contract):  # a folder of all kinds may hold another kind
            raise UserError(f"two parts are called '{name}': {short(path)} and {short(other)}; rename yours")
    kind = class_in(path, contract)
    if kind is None:
        wanted = name.title().replace("_", "")
        raise UserError(
            f"{short(path)} should define a class {wanted} that is a {contract.__name__}{_classes_in(path)}"
        )
    missing = [n for n in dir(kind) if getattr(getattr(kind, n, None), "__isabstractmethod__", False)]
    if missing:
        raise UserError(f"{short(path)}: class {kind.__name__} does not define {', '.join(missing)}")
    return kind


def _classes_in(path: Path) -> str:
    module = _load(path)
    own = [t.__name__ for t in vars(module).values() if inspect.isclass(t) and t.__module__ == module.__name__]
    return f", and holds {', '.join(own)}" if own else ", and holds no class"


@cache
def _load(path: Path) -> types.ModuleType:
    if path.is_relative_to(REGARD):
        return importlib.import_module(".".join(("regard", *path.relative_to(REGARD).with_suffix("").parts)))
    name = f"regard_parts_of_user_{path.parent.name}_{path.stem}_{abs(hash(path))}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's file may do when it is run
        del sys.modules[name]
        raise UserError(f"{_where(path, error)} does not load: {type(error).__name__}: {in_one_line(error)}") from error
    return module


def _where(path: Path, error: BaseException) -> str:
    """Return the file and the line in it at which an error arose."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    at = error.__traceback__
    while at is not None:
        line = at.tb_lineno if at.tb_frame.f_code.co_filename == str(path) else line
        at = at.tb_next
    return f"{short(path)}, line {line}" if line else short(path)


def class_in(path: Path, contract: type[T]) -> type[T] | None:
    """Return the class of this kind that has the file's name; None: there is none."""
    wanted = path.stem.replace("_", "")
    for thing in vars(_load(path)).values():
        if inspect.isclass(thing) and thing.__name__.lower().rstrip("_") == wanted and issubclass(thing, contract):
            return thing
    return None


def name_of(thing: object) -> str:
    """Return the recipe name of a part, given as an instance or a class."""
    kind = thing if isinstance(thing, type) else type(thing)
    return Path(inspect.getfile(kind)).stem


def part(contract: type[T], spec: Any, **inherited: Any) -> T:
    """Return a part from a name or a table { part = name, ... }; an instance is returned as it is.

    `inherited` arguments are passed on where the constructor takes them and the table does not set them.
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
        return make(find(contract, spec["part"]), given, inherited, spec["part"])
    except UserError as error:
        raise error.inside(slot) from error.__cause__


def make(kind: type[T], given: dict[str, Any], inherited: dict[str, Any], name: str) -> T:
    """Return an instance from a table of arguments; any error of its constructor becomes a UserError."""
    for key in ENCLOSING:
        if key in given and key in inherited and given[key] != inherited[key]:
            raise UserError(
                f"{name}.{key} is {inherited[key]} here, from what stands around it, and cannot be {given[key]!r}"
            )
    arguments = check_arguments(kind, given, inherited, name)
    try:
        return kind(**arguments)
    except UserError:
        raise
    except Exception as error:  # from inside torch, or from a user's own part
        told = ", ".join(f"{key} = {value!r}" for key, value in given.items())
        path = Path(inspect.getfile(kind))
        where = "" if path.is_relative_to(REGARD) else f" ({_where(path, error)})"
        raise UserError(
            f"{name} cannot be made{' with ' * bool(told)}{told}: {type(error).__name__}: {in_one_line(error)}{where}"
        ) from error


def check_arguments(
    kind: type, given: dict[str, Any], inherited: dict[str, Any], name: str | None = None
) -> dict[str, Any]:
    """Return the arguments for a constructor, checked against its signature."""
    name = name or name_of(kind)
    wanted = _parameters(kind)
    open_to_all = [key for key in wanted if key not in ASSEMBLED]
    for key in given:
        if key not in open_to_all:
            hint = nearest_key(name, str(key), open_to_all) if name in SETTINGS else nearest(str(key), open_to_all)
            raise UserError(f"{name} has no '{key}'{hint}")
    hints = _hints(kind)
    arguments = {key: value for key, value in inherited.items() if key in wanted} | given
    for key, parameter in wanted.items():
        if key in arguments:
            _check(f"{name}.{key}", key, arguments[key], hints.get(key))
        elif parameter.default is parameter.empty:
            words = _words(hints.get(key))
            raise UserError(f"{name} needs '{key}'{f', {words}' if words else ''}")
    return arguments


def takes(kind: type, argument: str) -> bool:
    """Return whether the constructor of a part takes this argument."""
    return argument in _parameters(kind)


@cache
def _parameters(kind: type) -> dict[str, inspect.Parameter]:
    every = inspect.signature(kind).parameters
    return {key: p for key, p in every.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


@cache
def _hints(kind: type) -> dict[str, Any]:
    target = kind if hasattr(kind, "__dataclass_fields__") else kind.__init__  # type: ignore[misc]
    try:
        return typing.get_type_hints(target)
    except NameError:  # a user's part may import names for its type checker alone
        return {}


def _kinds(hint: Any) -> tuple:
    kinds = (
        typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union else ()
    )
    return tuple(typing.get_origin(kind) or kind for kind in kinds or (hint,))


def _words(hint: Any) -> str:
    return " or ".join(WORDS[kind] for kind in _kinds(hint) if kind in WORDS)


def _check(where: str, key: str, value: Any, hint: Any) -> None:
    """Check a value against a type hint of simple types; the constructor checks anything else."""
    kinds = _kinds(hint)
    if hint is None or not all(kind in WORDS or kind is type(None) for kind in kinds):
        return
    whole = isinstance(value, int) and not isinstance(value, bool)
    right = bool in kinds if isinstance(value, bool) else isinstance(value, kinds) or (whole and float in kinds)
    if not right:
        raise UserError(f"{where} must be {_words(hint)}, not {shown(value)}")
    if key in SIZES and whole and value < 1:
        raise UserError(f"{where} must be at least 1, not {value}")
    if whole and key != "seed" and value > SIZES.get(key, MAX_INT):
        raise UserError(f"{where} must be at most {SIZES.get(key, MAX_INT):,}, not {value:,}")
    if key == "eps" and value is not None and value < 0:
        raise UserError(f"{where} must not be negative, and is {value}")
    if (key == "dropout" or key.endswith("_dropout")) and not 0 <= value < 1:
        raise UserError(f"{where} must be at least 0 and below 1, not {value}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where} must be a number, not {value}")
