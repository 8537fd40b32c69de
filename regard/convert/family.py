"""A family of models: what config.json says as a recipe and back, and which tensor is which of ours."""

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
KINDS: dict[str, Any] = {  # of entries whose default does not tell what else they may be
    "sliding_window": Positive | None, "num_key_value_heads": Positive | None, "head_dim": Positive | None,
    "mem_len": Natural | None, "reuse_len": Natural | None, "max_window_layers": Natural, "type_vocab_size": Natural,
    "expansion_ratio": Annotated[float, Range(0)], "alibi_bias_max": Annotated[float, Range(0)],
    "clip_qkv": float | None, "softmax_scale": float | None, "layer_types": list[str] | None,
    "cutoffs": list[Positive], "tie_projs": list[bool], "patch_size": Positive | list[Positive],
    "image_size": Positive | list[Positive], "attn_type": int | str, "clamp_len": int, "sample_softmax": int,
    "ext_len": int, "tgt_len": int, "rotary_value": bool | None,
}  # fmt: skip
SMALLEST, LARGEST = 1e-30, 100.0  # that is added before a norm divides


def schema_of(name: str, default: Any) -> Any:
    """The type of an entry of config.json: by its name, else by its default. A null leaves a number to the recipe."""
    if name in KINDS:
        return KINDS[name]
    if name.endswith("_token_id"):
        return int | list[int] | None
    if name.endswith(("_eps", "_epsilon")):
        return Annotated[float, Range(SMALLEST, LARGEST)] | None
    if default is None:
        return Positive | None
    if isinstance(default, float):
        return float | None
    return Positive if type(default) is int else type(default)


class Family:
    """Written down in a file of regard/convert/families; a model of it begins from a recipe that comes with regard.

    recipe_name:   that recipe.
    recipes:       others of regard's that can go out as this family.
    model_type:    of config.json.
    architectures: their classes that can be read, the usual one first.
    defaults:      of entries that a config.json may leave out, as their config class has them.
    keys:          what stands where.
    only:          entries that must have this value: regard knows nothing else there.
    ignored:       tensors that hold nothing learned, as patterns: masks, counters.
    reads:         what its runs read: "text" needs a tokenizer; "images", "sound".
    """

    recipe_name: ClassVar[str]
    recipes: ClassVar[tuple[str, ...]] = ()
    model_type: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]]
    defaults: ClassVar[Config] = {}
    keys: ClassVar[tuple[Key, ...]] = ()
    only: ClassVar[Config] = {}
    ignored: ClassVar[tuple[str, ...]] = ()
    reads: ClassVar[str] = "text"

    def rules(self, config: Config, names: Collection[str]) -> Iterator[Rule]:
        """config: with the defaults filled in. names: of the checkpoint's tensors, where it matters which prefix they
        have; of a model that goes back, empty: then as `architectures` of the config has it."""
        raise NotImplementedError

    def beside(self, folder: Folder) -> Config:
        """What other files of the folder say, as if config.json did."""
        return {}

    def seen(self, config: Config, names: Collection[str]) -> Config:
        """What the names of the checkpoint's tensors say, as if config.json did."""
        return {}

    def files(self, config: Config, told: dict[str, Any]) -> dict[str, Any]:
        """Other JSON files that go out with such a model, by name."""
        return {}

    def new_head(self, task: str, model: Config) -> Config:
        """What the head for a new task has here, besides its part: classify, match or tag. model: of the recipe."""
        return {}

    def aliases(self, config: Config) -> dict[str, str]:
        """Tensors that some checkpoints hold twice: the second name -> the one that a rule has."""
        return {}

    def recipe(self, config: Config) -> recipe.Recipe:
        """The regard recipe of a config, whole: its sizes are gone."""
        made = recipe.load(self.recipe_name)
        for key in self.keys:
            value = key.into(dig(config, key.theirs))
            for place in key.places:
                put(made, place, self._named(key, value))
        return made

    def config(self, made: recipe.Recipe) -> Config:
        """The config.json of a recipe of this family."""
        config = copy.deepcopy(self.defaults) | {
            "model_type": self.model_type,
            "architectures": [self.architectures[0]],
        }
        for key in self.keys:
            value = dig(made, key.places[0])
            if key.names is not None:
                back = [theirs for theirs, ours in key.names.items() if ours == value]
                if not back:
                    raise UserError(f"{key.places[0]} is '{value}', and a {self.model_type} has only "
                                    f"{', '.join(str(ours) for ours in key.names.values())}")  # fmt: skip
                value = back[0]
            _put_dotted(config, key.theirs, key.back(value))
        return config

    def whole(self, config: Config) -> Config:
        """With what it leaves out, checked for what regard cannot do."""
        filled = _over(copy.deepcopy(self.defaults), config)
        _check_entries(filled, self.defaults)
        for name, value in self.only.items():
            found = dig(filled, name, value)
            if found != value:
                raise UserError(f"config.json says {name} = {found!r}, and regard reads a {self.model_type} only with "
                                f"{value!r}")  # fmt: skip
        return filled

    def skips(self, name: str) -> bool:
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
    """By model_type."""
    found = {}
    for path in sorted(FOLDER.glob("[a-z]*.py")):
        module = import_module(f"regard.convert.families.{path.stem}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Family) and value.__module__ == module.__name__:
                found[value.model_type] = value()
    return found


def family_of(config: Config) -> Family:
    """By config.json."""
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


def _check_entries(config: Config, defaults: Config, inside: tuple[str, ...] = ()) -> None:
    """Refuse values that no model can have: words for numbers, negative sizes, norms that divide by nothing."""
    for name, default in defaults.items():
        try:
            check_type(config[name], schema_of(name, default))
        except UserError as error:
            raise UserError(error.message, (*inside, name, *error.path), "config.json") from None
        if isinstance(default, dict):
            _check_entries(config[name], default, (*inside, name))


def dig(table: Any, path: str, default: Any = None) -> Any:
    """The value at a dotted path, lists by number."""
    for step in path.split("."):
        if isinstance(table, list):
            table = table[int(step)] if step.isdecimal() and int(step) < len(table) else None
        else:  # a part's name alone has no entries
            table = table.get(step) if isinstance(table, dict) else None
        if table is None:
            return default
    return table


def put(made: recipe.Recipe, path: str, value: Any) -> None:
    """Into a recipe, as an override does; None takes the entry away, so that the part's own default holds."""
    *steps, last = path.split(".")
    here: Any = made
    for step in steps:
        here = recipe._enter(here, step)
    if value is None:
        here.pop(last, None)
    else:
        recipe._set(here, last, value)


def _put_dotted(table: Config, path: str, value: Any) -> None:
    *steps, last = path.split(".")
    for step in steps:
        table = table.setdefault(step, {})
    table[last] = value


def _over(base: Config, more: Config) -> Config:
    """Deep: tables are merged, all else replaced."""
    for key, value in more.items():
        base[key] = _over(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return base
