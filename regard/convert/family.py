"""A family of models: how its config.json maps to a recipe and back, and how its tensors map to ours."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar

from regard.core import UserError
from regard.errors import nearest
from regard.files import recipe
from regard.files.reading import Natural, Positive, Range, check_type

from .folder import Folder
from .rules import Key, Rule

Config = dict[str, Any]
FOLDER = Path(__file__).parent / "families"
ENTRY_TYPES: dict[str, Any] = {  # of entries whose default does not tell their type
    "sliding_window": Positive | None, "num_key_value_heads": Positive | None, "head_dim": Positive | None,
    "mem_len": Natural | None, "reuse_len": Natural | None, "max_window_layers": Natural, "type_vocab_size": Natural,
    "expansion_ratio": Annotated[float, Range(0)], "alibi_bias_max": Annotated[float, Range(0)],
    "clip_qkv": float | None, "softmax_scale": float | None, "layer_types": list[str] | None,
    "cutoffs": list[Positive], "tie_projs": list[bool], "patch_size": Positive | list[Positive],
    "image_size": Positive | list[Positive], "attn_type": int | str, "clamp_len": int, "sample_softmax": int,
    "ext_len": int, "tgt_len": int, "rotary_value": bool | None,
}  # fmt: skip
MIN_EPS, MAX_EPS = 1e-30, 100.0  # of a norm


def schema_of(name: str, default: Any) -> Any:
    """Return the type of an entry of config.json, by its name or by its default. None leaves a number to the recipe."""
    if name in ENTRY_TYPES:
        return ENTRY_TYPES[name]
    if name.endswith("_token_id"):
        return int | list[int] | None
    if name.endswith(("_eps", "_epsilon")):
        return Annotated[float, Range(MIN_EPS, MAX_EPS)] | None
    if default is None:
        return Positive | None
    if isinstance(default, float):
        return float | None
    return Positive if type(default) is int else type(default)


class Family:
    """The base of all families, each of which is a file of regard/convert/families.

    recipe_name:     the built-in recipe from which its recipes are made.
    recipes:         other built-in recipes that can be exported as this family.
    model_type:      that of config.json.
    architectures:   the classes of transformers that can be read, the usual one first.
    defaults:        of entries that a config.json may leave out, as the config class of transformers has them.
    keys:            entries of config.json and of the recipe that correspond.
    required_values: entries of config.json that must have this value, because regard supports no other.
    ignored:         patterns of tensor names that hold nothing learned, such as masks and counters.
    reads:           what its runs read: "text", which needs a tokenizer, "images" or "sound".
    """

    recipe_name: ClassVar[str]
    recipes: ClassVar[tuple[str, ...]] = ()
    model_type: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]]
    defaults: ClassVar[Config] = {}
    keys: ClassVar[tuple[Key, ...]] = ()
    required_values: ClassVar[Config] = {}
    ignored: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[str] = "text"

    def rules(self, config: Config, names: Collection[str]) -> Iterator[Rule]:
        """Yield the rules for all tensors.

        config: with the defaults filled in.
        names:  of the checkpoint's tensors, which may have a prefix or not; empty for an export, where the
                `architectures` of the config decide.
        """
        raise NotImplementedError

    def config_from_files(self, folder: Folder) -> Config:
        """Return entries of config.json that follow from other files in the folder."""
        return {}

    def config_from_tensors(self, config: Config, names: Collection[str]) -> Config:
        """Return entries of config.json that follow from the names of the checkpoint's tensors."""
        return {}

    def files(self, config: Config, run_info: dict[str, Any]) -> dict[str, Any]:
        """Return the other JSON files of an export, by name."""
        return {}

    def new_head(self, task: str, model: Config) -> Config:
        """Return the usual arguments of the head for a task: classify, match or tag. model: that of the recipe."""
        return {}

    def aliases(self, config: Config) -> dict[str, str]:
        """Return the tensors that some checkpoints hold twice: second name -> the name in a rule."""
        return {}

    def recipe(self, config: Config) -> recipe.Recipe:
        """Return the recipe of a config, without named sizes."""
        made = recipe.load(self.recipe_name)
        for key in self.keys:
            value = key.into(get_path(config, key.theirs))
            for place in key.places:
                set_path(made, place, self._named(key, value))
        return made

    def config(self, made: recipe.Recipe) -> Config:
        """Return the config.json of a recipe of this family."""
        config = copy.deepcopy(self.defaults) | {
            "model_type": self.model_type,
            "architectures": [self.architectures[0]],
        }
        for key in self.keys:
            value = get_path(made, key.places[0])
            if key.names is not None:
                back = [theirs for theirs, ours in key.names.items() if ours == value]
                if not back:
                    raise UserError(f"{key.places[0]} is '{value}', and a {self.model_type} has only "
                                    f"{', '.join(str(ours) for ours in key.names.values())}")  # fmt: skip
                value = back[0]
            _set_config(config, key.theirs, key.back(value))
        return config

    def complete(self, config: Config) -> Config:
        """Return the config with its defaults filled in. Refuse entries that regard does not support."""
        filled = _merge(copy.deepcopy(self.defaults), config)
        _check_entries(filled, self.defaults)
        for name, value in self.required_values.items():
            found = get_path(filled, name, value)
            if found != value:
                raise UserError(f"config.json says {name} = {found!r}, and regard reads a {self.model_type} only with "
                                f"{value!r}")  # fmt: skip
        return filled

    def ignores(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.ignored)

    def _named(self, key: Key, value: Any) -> Any:
        if key.names is None:
            return copy.deepcopy(value)
        if value not in key.names:
            raise UserError(
                f"config.json says {key.theirs} = {value!r}, which regard does not know"
                f"{nearest(str(value), map(str, key.names))}"
            )
        return key.names[value]


@cache
def every_family() -> dict[str, Family]:
    """Return all families by model_type."""
    found = {}
    for path in sorted(FOLDER.glob("[a-z]*.py")):
        module = import_module(f"regard.convert.families.{path.stem}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Family) and value.__module__ == module.__name__:
                found[value.model_type] = value()
    return found


def family_of(config: Config) -> Family:
    """Return the family of a config.json."""
    known = every_family()
    kind = config.get("model_type")
    if kind not in known:
        said = f"model_type '{kind}'" if kind else "no model_type"
        raise UserError(f"config.json says {said}, which regard does not read{nearest(str(kind), known)}")
    family = known[kind]
    classes = config.get("architectures") or []
    if classes and classes[0] not in family.architectures:
        raise UserError(
            f"config.json says architecture '{classes[0]}'; of a {kind}, regard reads {', '.join(family.architectures)}"
            f"{nearest(classes[0], family.architectures)}"
        )
    return family


def _check_entries(config: Config, defaults: Config, path: tuple[str, ...] = ()) -> None:
    """Refuse values that no model can have: strings for numbers, negative sizes, an epsilon of 0."""
    for name, default in defaults.items():
        try:
            check_type(config[name], schema_of(name, default))
        except UserError as error:
            raise UserError(error.message, (*path, name, *error.path), "config.json") from None
        if isinstance(default, dict):
            _check_entries(config[name], default, (*path, name))


def get_path(table: Any, path: str, default: Any = None) -> Any:
    """Return the value at a dotted path, in which numbers index lists."""
    for step in path.split("."):
        if isinstance(table, list):
            table = table[int(step)] if step.isdecimal() and int(step) < len(table) else None
        else:  # a part's name alone has no entries
            table = table.get(step) if isinstance(table, dict) else None
        if table is None:
            return default
    return table


def set_path(made: recipe.Recipe, path: str, value: Any) -> None:
    """Set an entry of a recipe, as an override does. None removes it, so that the part's default holds."""
    *steps, last = path.split(".")
    here: Any = made
    for step in steps:
        here = recipe._enter(here, step)
    if value is None:
        here.pop(last, None)
    else:
        recipe._set(here, last, value)


def _set_config(table: Config, path: str, value: Any) -> None:
    *steps, last = path.split(".")
    for step in steps:
        table = table.setdefault(step, {})
    table[last] = value


def _merge(base: Config, more: Config) -> Config:
    """Merge a config into another, nested tables included."""
    for key, value in more.items():
        base[key] = _merge(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return base
