"""Convert a Hugging Face folder to a run folder or back, tensor by tensor. The new folder appears only when complete.

convert("llama-3-8b", "runs/llama")       import
convert("runs/llama", "llama-again")      export
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
import torch
from torch import Tensor

from regard.core import Model, UserError, build
from regard.core.recipe import check_weights_size
from regard.data.tokenizer import Tokenizer
from regard.errors import nearest, short
from regard.files import recipe as recipes
from regard.files.paths import copy_files, must_be_new
from regard.files.reading import check_type
from regard.memory import check_fits_memory, stacks
from regard.runs.folder import load_tokenizers, read_run_json
from regard.runs.provenance import session_record

from .family import Config, Family, every_family, family_of
from .folder import WEIGHTS_FILE, Folder, TensorInfo, Tensors
from .folder import Config as Schema
from .rules import Rule
from .stream import size_of, write, write_shards
from .tokens import marks_of, tokenizers_of

Tick = Callable[[int, int], None]  # bytes done, bytes in all

UNUSED_FILE = "unread.safetensors"  # in a run: imported tensors that the model does not use, kept for the export
SHARD_BYTES = 5_000_000_000  # largest file of an export
COPIED_FILES = ("*.json", "*.txt", "*.model", "*.spm", "*.jinja", "*/config.json", "README.md", "LICENSE*")
LABEL_OBJECTIVES = ("classify", "tag", "match")  # objectives whose answers are labels
REWRITTEN_FILES = ("config.json", "*.index.json", "tokenizer.json")


class Converted(NamedTuple):
    """The result of a conversion."""

    family: str
    folder: Path
    tensors: int
    parameters: int
    note: str = ""


def convert(
    source: str | Path,
    target: str | Path,
    pickle: bool = False,
    to: str | None = None,
    shard: int = SHARD_BYTES,
    tick: Tick = lambda done, total: None,
) -> Converted:
    """Export the source if it is a run folder; import it if it is a folder in the Hugging Face layout.

    pickle: allow weights written by torch.save, of which only tensors are read.
    to:     the family as which a run that was trained here is exported; None: that of its recipe.
    shard:  largest file of an export, in bytes.
    """
    source, target = Path(source), Path(target)
    if not source.is_dir():
        raise UserError(f"there is no folder '{short(source)}'")
    if (source / "run.json").is_file():
        return export_model(source, target, to, shard, tick)
    return import_model(source, target, pickle, tick)


def import_model(source: Path, target: Path, pickle: bool, tick: Tick) -> Converted:
    folder = Folder(source, pickle)
    family = family_of(folder.config)
    config = folder.config | family.config_from_files(folder)
    config = family.complete(config | family.config_from_tensors(config, folder.info))
    recipe = family.recipe(config)
    _check_depth(recipe, len(folder.info))
    model = model_shapes(recipe)
    rules = list(family.rules(config, folder.info))
    _check_tensors(folder, family, config, rules, model)
    ours = {name: (rule, k) for rule in rules for k, name in enumerate(map(model.canonical.__getitem__, rule.ours))}
    plan = {name: TensorInfo(shape, folder.info[ours[name][0].theirs].dtype) for name, shape in model.shapes.items()}
    check_fits_memory("its largest tensor", max(map(size_of, folder.info.values()), default=0))
    tokenizers = tokenizers_of(folder, config)
    too_many = max((one.size for one in tokenizers), default=0)
    vocab = recipe["vocab"] if isinstance(recipe["vocab"], int) else max(recipe["vocab"])
    if tokenizers and too_many > vocab:
        raise UserError(f"{short(source)}: the tokenizer has {too_many} tokens and the model {vocab}")

    labels = _labels(config) if recipe.get("objective", {}).get("part") in LABEL_OBJECTIVES else []
    if labels and tokenizers:
        tokenizers = [tokenizers[0], Tokenizer.from_labels(labels, ordered=True)]

    def take(name: str) -> Tensor:
        rule, k = ours[name]
        return rule.split(folder[rule.theirs])[k]

    unread = set(folder.info) - {rule.theirs for rule in rules} - set(family.aliases(config))
    with atomic_folder(target) as part:
        write(part / WEIGHTS_FILE, plan, take, _ticker(plan, tick))
        if unread:
            write(
                part / UNUSED_FILE, {name: folder.info[name] for name in unread}, folder.__getitem__, lambda size: None
            )
        (part / "recipe.toml").write_text(tomli_w.dumps(recipe), encoding="utf-8")
        _keep_files(source, part / "origin")
        names = ("tokenizer",) if len(tokenizers) == 1 else ("source.tokenizer", "target.tokenizer")
        for name, tokenizer in zip(names, tokenizers, strict=False):
            tokenizer.save(part / f"{name}.json")
        origin = {"family": family.model_type, "config": folder.config, "tensors": sorted(folder.info)}
        run_info: dict[str, Any] = {"origin": origin, "documents": True}
        hashes = [one.hash() for one in (tokenizers * 2)[:2]]
        run_info |= {
            "tokenizers": hashes or (None if family.reads == "text" else []),
            "marks": marks_of(folder, config),
        }
        run_info |= {"labels": labels} if labels else {}
        run_info |= {"target_marks": None} if labels and tokenizers else {}  # labels have special tokens of their own
        run_info |= {"parameters": model.parameters, "sessions": [session_record()]}
        (part / "run.json").write_text(json.dumps(run_info, indent=1), encoding="utf-8")
    note = "" if tokenizers or family.reads != "text" else NO_TOKENIZER.format(short(source))
    return Converted(family.model_type, target, len(folder.info), model.parameters, note)


NO_TOKENIZER = (
    "{} holds no tokenizer that can be read (tokenizer.json, vocab.txt, or vocab.json and merges.txt): the model is "
    "there (regard.restore), but texts cannot be given to it until a tokenizer.json is put into the run folder"
)


def export_model(run: Path, target: Path, to: str | None, shard: int, tick: Tick) -> Converted:
    run_info, recipe = read_run_json(run), recipes.load(run / "recipe.toml")
    if not (run / WEIGHTS_FILE).is_file():
        raise UserError(f"{short(run)} holds no finished model: let its training end first")
    if recipe["model"].get("passes"):
        raise UserError(f"{short(run)}: a model with passes ({recipe['model']['passes']}) has no place in the Hugging "
                        "Face layout: merge LoRA first (regard merge)")  # fmt: skip
    origin = run_info.get("origin") or {}
    if missing := [key for key in ("config", "tensors") if origin and key not in origin]:
        raise UserError(f"{short(run / 'run.json')}: origin has no '{missing[0]}', without which it cannot go back")
    try:
        check_type(origin.get("config", {}), Schema)
    except UserError as error:
        raise error.inside("config").inside("origin").of(short(run / "run.json")) from None
    check_weights_size(run / "recipe.toml", run / WEIGHTS_FILE)
    model = model_shapes(recipe)  # refuses a recipe that nothing can be built from
    family = _family_for(recipe, run_info, to)
    config = _config(family, recipe, origin) | ({} if origin else _marks(run, recipe))
    if run_info.get("labels") and not origin:
        config |= {"id2label": dict(enumerate(run_info["labels"])), "label2id": _numbered(run_info["labels"])}
    whole = family.complete(config | family.config_from_tensors(config, origin.get("tensors", ())))
    _check_recipe(family.recipe(whole), recipe, family)
    source, unread = _weights(run), _weights(run, UNUSED_FILE)
    rules = list(family.rules(whole, origin.get("tensors", ())))
    stored = {model.canonical[name]: name for name in source.info if name in model.canonical}
    for name in model.shapes:
        if name not in stored:
            raise UserError(f"{short(run / WEIGHTS_FILE)} lacks {name}")

    def joined(rule: Rule, take: Callable[[str], Tensor]) -> Tensor:
        return rule.join([take(stored[model.canonical[name]]) for name in rule.ours])

    by_name = {rule.theirs: rule for rule in rules}
    plan = {}
    for name, rule in by_name.items():
        shape = joined(rule, lambda n: torch.empty(source.info[n].shape, device="meta")).shape
        plan[name] = TensorInfo(tuple(shape), source.info[stored[model.canonical[rule.ours[0]]]].dtype)
    duplicates = {a: b for a, b in family.aliases(whole).items() if a in origin.get("tensors", ()) and b in by_name}
    plan |= {alias: plan[name] for alias, name in duplicates.items()} | unread.info

    def take(name: str) -> Tensor:
        return unread[name] if name in unread.info else joined(by_name[duplicates.get(name, name)], source.__getitem__)

    with atomic_folder(target) as part:
        write_shards(part, plan, take, shard, _ticker(plan, tick))
        if (run / "origin").is_dir():
            copy_files(run / "origin", part)
        if (run / "tokenizer.json").is_file():
            shutil.copy(run / "tokenizer.json", part / "tokenizer.json")
        for name, value in family.files(whole, run_info).items():
            (part / name).parent.mkdir(exist_ok=True)
            (part / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return Converted(family.model_type, target, len(plan), model.parameters)


def _marks(run: Path, recipe: recipes.Recipe) -> Config:
    """Return the ids of a run's special tokens as entries of config.json."""
    if not any(run.glob("*tokenizer.json")):
        return {}
    source, target = load_tokenizers(run)
    ids = {"pad_token_id": source.pad, "bos_token_id": source.start, "eos_token_id": source.end}
    return ids | ({"decoder_start_token_id": target.start} if recipe["model"]["kind"] == "encoder-decoder" else {})


def _config(family: Family, recipe: recipes.Recipe, origin: dict[str, Any]) -> Config:
    """Return config.json: the imported one, changed only where the recipe has changed since; else a new one."""
    now = family.config(recipe)
    if not origin:
        return now
    came = origin["config"]
    then = family.config(family.recipe(family.complete(came | family.config_from_tensors(came, origin["tensors"]))))
    return came | {key: value for key, value in now.items() if then.get(key) != value}


class ModelShapes(NamedTuple):
    """The tensors of a model by name and shape, without weights."""

    shapes: dict[str, tuple[int, ...]]  # by canonical name
    canonical: dict[str, str]  # any name of a tensor -> its first name, under which its file holds it
    parameters: int


def model_shapes(recipe: recipes.Recipe) -> ModelShapes:
    with torch.device("meta"):
        model: Model = build(recipe)
    first: dict[int, str] = {}
    names = {}
    tensors = dict(model.named_parameters(remove_duplicate=False))
    kept = set(model.state_dict())
    tensors |= {n: b for n, b in model.named_buffers(remove_duplicate=False) if n in kept}
    for name, tensor in tensors.items():
        names[name] = first.setdefault(id(tensor), name)
    shapes = {name: tuple(tensors[name].shape) for name in dict.fromkeys(names.values())}
    return ModelShapes(shapes, names, sum(p.numel() for p in model.parameters()))


def _check_depth(recipe: recipes.Recipe, tensors: int) -> None:
    """Refuse more layers than there are tensors, before they are built."""
    for stack, _, depth in stacks(recipe["model"]):
        if depth > tensors and stack.get("share") != "layers":
            raise UserError(f"config.json says {depth:,} layers, and the weights are only {tensors:,} tensors")


def _check_tensors(folder: Folder, family: Family, config: Config, rules: list[Rule], model: ModelShapes) -> None:
    """Refuse a folder with a tensor that is missing, superfluous or of the wrong shape."""
    aliases = family.aliases(config)
    where, filled = short(folder.path), set()
    for rule in rules:
        for name in rule.ours:
            if name not in model.canonical:
                raise UserError(
                    f"{where}: {rule.theirs} has no place: the model that config.json describes lacks {name}"
                )
        shape = rule.join([torch.empty(model.shapes[model.canonical[name]], device="meta") for name in rule.ours]).shape
        if rule.theirs not in folder.info:
            near = nearest(rule.theirs, folder.info)
            raise UserError(f"{where}: the tensor {rule.theirs} {tuple(shape)} is missing{near}")
        found = folder.info[rule.theirs].shape
        if tuple(shape) != found:
            raise UserError(f"{where}: the tensor {rule.theirs} is {found}, and config.json makes it {tuple(shape)}")
        filled |= {model.canonical[name] for name in rule.ours}
    if left := sorted(set(model.shapes) - filled):
        raise UserError(f"{where}: nothing there becomes {left[0]}, which the model that config.json describes has")
    read = {rule.theirs for rule in rules}
    for name in folder.info:
        if name in read or family.ignores(name):
            continue
        if name not in aliases:
            raise UserError(
                f"{where}: the tensor {name} {folder.info[name].shape} is one too many: a {family.model_type} with "
                "this config.json does not have it"
            )
        if not torch.equal(folder[name], folder[aliases[name]]):
            raise UserError(f"{where}: {name} should be a copy of {aliases[name]}, and differs from it")


def _family_for(recipe: recipes.Recipe, run_info: dict[str, Any], to: str | None) -> Family:
    known = every_family()
    if to is not None:
        if to not in known:
            raise UserError(f"unknown family '{to}'{nearest(to, known)}: {', '.join(sorted(known))}")
        return known[to]
    if run_info.get("origin"):
        if run_info["origin"]["family"] not in known:
            raise UserError(f"run.json: origin.family is '{run_info['origin']['family']}', which regard does not know")
        return known[run_info["origin"]["family"]]
    name = Path(str(run_info.get("job", {}).get("recipe", ""))).stem
    found = [family for family in known.values() if family.recipe_name == name or name in family.recipes]
    if not found:
        raise UserError(
            f"the recipe '{name}' has no Hugging Face family; those that can be exported are "
            f"{', '.join(sorted(known))} (--to)"
        )
    return found[0]


def _check_recipe(wanted: recipes.Recipe, recipe: recipes.Recipe, family: Family) -> None:
    """Refuse a recipe that differs from what its family can express."""
    for place, ours, theirs in _differences(recipe["model"], wanted["model"], "model"):
        raise UserError(
            f"{place} is {ours!r} here, and a {family.model_type} has {theirs!r}: it cannot be exported as one"
        )


IRRELEVANT_KEYS = (
    "dropout",
    "weight_dropout",
    "hidden_dropout",
    "kernel",
)  # do not change what a trained model computes


def _differences(ours: Any, theirs: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in {**ours, **theirs}:
            if key not in IRRELEVANT_KEYS:
                yield from _differences(ours.get(key), theirs.get(key), f"{place}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(one, other, f"{place}.{i}")
    elif _plain(ours) != _plain(theirs):
        yield place, ours, theirs


def _plain(entry: Any) -> Any:
    """Return a table that holds nothing but a part's name as that name, which means the same."""
    return entry["part"] if isinstance(entry, dict) and set(entry) == {"part"} else entry


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to the target at the end, or removed after an error."""
    must_be_new(target)
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        yield part
        if target.exists():
            target.rmdir()
        part.rename(target)
    except OSError as error:
        raise UserError(f"{short(target)} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _keep_files(source: Path, target: Path) -> None:
    """Copy the other files of an imported folder, which are exported again with the weights."""
    dropped = {path for pattern in REWRITTEN_FILES for path in source.glob(pattern)}
    for path in sorted({path for pattern in COPIED_FILES for path in source.glob(pattern)} - dropped):
        (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target / path.relative_to(source))


def _weights(run: Path, name: str = WEIGHTS_FILE) -> Tensors:
    """Return the tensors of a file in the run; none where there is no such file."""
    return Tensors(*[path for path in [run / name] if path.is_file()])


def _labels(config: Config) -> list[str]:
    """Return the names of the labels, ordered by id; unnamed ones are LABEL_0, LABEL_1, ..."""
    if not config.get("id2label"):
        return [f"LABEL_{i}" for i in range(int(config.get("num_labels") or 2))]
    if not all(number.isdecimal() for number in config["id2label"]):
        raise UserError("config.json: the keys of id2label are not all numbers")
    return [str(name) for _, name in sorted(config["id2label"].items(), key=lambda item: int(item[0]))]


def _numbered(labels: list[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(labels)}


def _ticker(plan: Mapping[str, TensorInfo], tick: Tick) -> Callable[[int], None]:
    total, done = sum(map(size_of, plan.values())), 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        tick(done, total)

    return advance
