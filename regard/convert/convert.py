"""Hugging Face folder <-> run folder: every tensor by its family's rules, one at a time. The new folder appears whole
or not at all.

    convert("llama-3-8b", "runs/llama")       in
    convert("runs/llama", "llama-again")      out
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
from regard.files.reading import must_be
from regard.memory import check_fits_memory, stacks
from regard.runs.folder import about, tokenizers
from regard.runs.session import session

from .family import Config, Family, every_family, family_of
from .folder import WHOLE, Folder, Known, Tensors
from .folder import Config as Schema
from .rules import Rule
from .stream import size_of, write, write_shards
from .tokens import marks_of, tokenizers_of

Tick = Callable[[int, int], None]  # bytes done, of how many

UNREAD = "unread.safetensors"  # in a run: tensors that came with it, and that nothing reads; they go back as they are
SHARD = 5_000_000_000  # bytes of a file that goes out
KEPT = ("*.json", "*.txt", "*.model", "*.spm", "*.jinja", "*/config.json", "README.md", "LICENSE*")  # files beside
LABELLED = ("classify", "tag", "match")  # objectives whose answers are labels
NOT_KEPT = ("config.json", "*.index.json", "tokenizer.json")


class Converted(NamedTuple):
    """What has been done."""

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
    shard: int = SHARD,
    tick: Tick = lambda done, whole: None,
) -> Converted:
    """Which way, the source decides: a run folder goes out, a folder with a config.json comes in.

    pickle: weights in files of torch.save may be read, nothing but tensors.
    to:     the family that a run trained here goes out as; None: that of its recipe.
    shard:  bytes of a file at the most, on the way out.
    """
    source, target = Path(source), Path(target)
    if not source.is_dir():
        raise UserError(f"there is no folder '{short(source)}'")
    if (source / "run.json").is_file():
        return go_out(source, target, to, shard, tick)
    return come_in(source, target, pickle, tick)


def come_in(source: Path, target: Path, pickle: bool, tick: Tick) -> Converted:
    folder = Folder(source, pickle)
    family = family_of(folder.config)
    config = folder.config | family.beside(folder)
    config = family.whole(config | family.seen(config, folder.known))
    recipe = family.recipe(config)
    _check_depth(recipe, len(folder.known))
    model = shell(recipe)
    rules = list(family.rules(config, folder.known))
    _check_tensors(folder, family, config, rules, model)
    ours = {name: (rule, k) for rule in rules for k, name in enumerate(map(model.first.__getitem__, rule.ours))}
    plan = {name: Known(shape, folder.known[ours[name][0].theirs].dtype) for name, shape in model.shapes.items()}
    check_fits_memory("its largest tensor", max(map(size_of, folder.known.values()), default=0))
    tokenizers = tokenizers_of(folder, config)
    too_many = max((one.size for one in tokenizers), default=0)
    vocab = recipe["vocab"] if isinstance(recipe["vocab"], int) else max(recipe["vocab"])
    if tokenizers and too_many > vocab:
        raise UserError(f"{short(source)}: the tokenizer has {too_many} tokens and the model {vocab}")

    labels = _labels(config) if recipe.get("objective", {}).get("part") in LABELLED else []
    if labels and tokenizers:
        tokenizers = [tokenizers[0], Tokenizer.of_labels(labels, ordered=True)]

    def take(name: str) -> Tensor:
        rule, k = ours[name]
        return rule.split(folder[rule.theirs])[k]

    unread = set(folder.known) - {rule.theirs for rule in rules} - set(family.aliases(config))
    with appearing(target) as part:
        write(part / WHOLE, plan, take, _ticker(plan, tick))
        if unread:
            write(part / UNREAD, {name: folder.known[name] for name in unread}, folder.__getitem__, lambda size: None)
        (part / "recipe.toml").write_text(tomli_w.dumps(recipe), encoding="utf-8")
        _keep_files(source, part / "origin")
        names = ("tokenizer",) if len(tokenizers) == 1 else ("source.tokenizer", "target.tokenizer")
        for name, tokenizer in zip(names, tokenizers, strict=False):
            tokenizer.save(part / f"{name}.json")
        origin = {"family": family.model_type, "config": folder.config, "tensors": sorted(folder.known)}
        told: dict[str, Any] = {"origin": origin, "documents": True}
        hashes = [one.hash() for one in (tokenizers * 2)[:2]]
        told |= {"tokenizers": hashes or (None if family.reads == "text" else []), "marks": marks_of(folder, config)}
        told |= {"labels": labels} if labels else {}
        told |= {"target_marks": None} if labels and tokenizers else {}  # labels have marks of their own
        told |= {"parameters": model.parameters, "sessions": [session()]}
        (part / "run.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
    note = "" if tokenizers or family.reads != "text" else NO_TOKENIZER.format(short(source))
    return Converted(family.model_type, target, len(folder.known), model.parameters, note)


NO_TOKENIZER = (
    "{} holds no tokenizer that can be read (tokenizer.json, vocab.txt, or vocab.json and merges.txt): the model is "
    "there (regard.restore), but texts cannot be given to it until a tokenizer.json is put into the run folder"
)


def go_out(run: Path, target: Path, to: str | None, shard: int, tick: Tick) -> Converted:
    told, recipe = about(run), recipes.load(run / "recipe.toml")
    if not (run / WHOLE).is_file():
        raise UserError(f"{short(run)} holds no finished model: let its training end first")
    if recipe["model"].get("passes"):
        raise UserError(f"{short(run)}: a model with passes ({recipe['model']['passes']}) has no place in the Hugging "
                        "Face layout: merge LoRA first (regard merge)")  # fmt: skip
    origin = told.get("origin") or {}
    if missing := [key for key in ("config", "tensors") if origin and key not in origin]:
        raise UserError(f"{short(run / 'run.json')}: origin has no '{missing[0]}', without which it cannot go back")
    try:
        must_be(origin.get("config", {}), Schema)
    except UserError as error:
        raise error.inside("config").inside("origin").of(short(run / "run.json")) from None
    check_weights_size(run / "recipe.toml", run / WHOLE)
    model = shell(recipe)  # refuses a recipe that nothing can be built from
    family = _family_for(recipe, told, to)
    config = _config(family, recipe, origin) | ({} if origin else _marks(run, recipe))
    if told.get("labels") and not origin:
        config |= {"id2label": dict(enumerate(told["labels"])), "label2id": _numbered(told["labels"])}
    whole = family.whole(config | family.seen(config, origin.get("tensors", ())))
    _check_recipe(family.recipe(whole), recipe, family)
    source, unread = _weights(run), _weights(run, UNREAD)
    rules = list(family.rules(whole, origin.get("tensors", ())))
    held = {model.first[name]: name for name in source.known if name in model.first}  # any one name of what is shared
    for name in model.shapes:
        if name not in held:
            raise UserError(f"{short(run / WHOLE)} lacks {name}")

    def joined(rule: Rule, take: Callable[[str], Tensor]) -> Tensor:
        return rule.join([take(held[model.first[name]]) for name in rule.ours])

    by_name = {rule.theirs: rule for rule in rules}
    plan = {}
    for name, rule in by_name.items():
        shape = joined(rule, lambda n: torch.empty(source.known[n].shape, device="meta")).shape
        plan[name] = Known(tuple(shape), source.known[held[model.first[rule.ours[0]]]].dtype)
    twice = {a: b for a, b in family.aliases(whole).items() if a in origin.get("tensors", ()) and b in by_name}
    plan |= {alias: plan[name] for alias, name in twice.items()} | unread.known

    def take(name: str) -> Tensor:
        return unread[name] if name in unread.known else joined(by_name[twice.get(name, name)], source.__getitem__)

    with appearing(target) as part:
        write_shards(part, plan, take, shard, _ticker(plan, tick))
        if (run / "origin").is_dir():
            copy_files(run / "origin", part)
        if (run / "tokenizer.json").is_file():
            shutil.copy(run / "tokenizer.json", part / "tokenizer.json")
        for name, value in family.files(whole, told).items():
            (part / name).parent.mkdir(exist_ok=True)
            (part / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return Converted(family.model_type, target, len(plan), model.parameters)


def _marks(run: Path, recipe: recipes.Recipe) -> Config:
    """Of a run that was trained here, the numbers of its marks, as config.json calls them."""
    if not any(run.glob("*tokenizer.json")):
        return {}
    source, target = tokenizers(run)
    told = {"pad_token_id": source.pad, "bos_token_id": source.start, "eos_token_id": source.end}
    return told | ({"decoder_start_token_id": target.start} if recipe["model"]["kind"] == "encoder-decoder" else {})


def _config(family: Family, recipe: recipes.Recipe, origin: dict[str, Any]) -> Config:
    """What a run came with, changed only where its recipe has changed since."""
    now = family.config(recipe)
    if not origin:
        return now
    came = origin["config"]
    then = family.config(family.recipe(family.whole(came | family.seen(came, origin["tensors"]))))
    return came | {key: value for key, value in now.items() if then.get(key) != value}


class Shell(NamedTuple):
    """A model without its numbers."""

    shapes: dict[str, tuple[int, ...]]  # of what its file holds
    first: dict[str, str]  # of all names of a tensor, the one in the file
    parameters: int


def shell(recipe: recipes.Recipe) -> Shell:
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
    return Shell(shapes, names, sum(p.numel() for p in model.parameters()))


def _check_depth(recipe: recipes.Recipe, tensors: int) -> None:
    """Refuse more layers than there are tensors, before so many are built."""
    for stack, _, depth in stacks(recipe["model"]):
        if depth > tensors and stack.get("share") != "layers":
            raise UserError(f"config.json says {depth:,} layers, and the weights are only {tensors:,} tensors")


def _check_tensors(folder: Folder, family: Family, config: Config, rules: list[Rule], model: Shell) -> None:
    """Nothing missing, nothing left over, everything of the right shape."""
    aliases = family.aliases(config)
    where, filled = short(folder.path), set()
    for rule in rules:
        for name in rule.ours:
            if name not in model.first:
                raise UserError(
                    f"{where}: {rule.theirs} has no place: the model that config.json describes lacks {name}"
                )
        shape = rule.join([torch.empty(model.shapes[model.first[name]], device="meta") for name in rule.ours]).shape
        if rule.theirs not in folder.known:
            near = nearest(rule.theirs, folder.known)
            raise UserError(f"{where}: the tensor {rule.theirs} {tuple(shape)} is missing{near}")
        found = folder.known[rule.theirs].shape
        if tuple(shape) != found:
            raise UserError(f"{where}: the tensor {rule.theirs} is {found}, and config.json makes it {tuple(shape)}")
        filled |= {model.first[name] for name in rule.ours}
    if left := sorted(set(model.shapes) - filled):
        raise UserError(f"{where}: nothing there becomes {left[0]}, which the model that config.json describes has")
    read = {rule.theirs for rule in rules}
    for name in folder.known:
        if name in read or family.skips(name):
            continue
        if name not in aliases:
            raise UserError(
                f"{where}: the tensor {name} {folder.known[name].shape} is one too many: a {family.model_type} with "
                "this config.json does not have it"
            )
        if not torch.equal(folder[name], folder[aliases[name]]):
            raise UserError(f"{where}: {name} should be {aliases[name]} once more, and differs from it")


def _family_for(recipe: recipes.Recipe, told: dict[str, Any], to: str | None) -> Family:
    known = every_family()
    if to is not None:
        if to not in known:
            raise UserError(f"unknown family '{to}'{nearest(to, known)}: {', '.join(sorted(known))}")
        return known[to]
    if told.get("origin"):
        if told["origin"]["family"] not in known:
            raise UserError(f"run.json: origin.family is '{told['origin']['family']}', which regard does not know")
        return known[told["origin"]["family"]]
    name = Path(str(told.get("job", {}).get("recipe", ""))).stem
    found = [family for family in known.values() if family.recipe_name == name or name in family.recipes]
    if not found:
        raise UserError(f"nobody else knows the recipe '{name}': what goes out is {', '.join(sorted(known))} (--to)")
    return found[0]


def _check_recipe(wanted: recipes.Recipe, recipe: recipes.Recipe, family: Family) -> None:
    """A recipe that has left its family cannot go out as one of it."""
    for place, ours, theirs in _differences(recipe["model"], wanted["model"], "model"):
        raise UserError(f"{place} is {ours!r} here, and a {family.model_type} has {theirs!r}: it cannot go out as one")


DULL = ("dropout", "weight_dropout", "hidden_dropout", "kernel")  # say nothing about what a trained model computes


def _differences(ours: Any, theirs: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in {**ours, **theirs}:
            if key not in DULL:
                yield from _differences(ours.get(key), theirs.get(key), f"{place}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(one, other, f"{place}.{i}")
    elif _plain(ours) != _plain(theirs):
        yield place, ours, theirs


def _plain(entry: Any) -> Any:
    """A part alone is as good as a table that names it."""
    return entry["part"] if isinstance(entry, dict) and set(entry) == {"part"} else entry


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A folder to fill, which takes its name when all is done and leaves nothing behind when not."""
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
    """What stands beside the weights goes back with them one day."""
    dropped = {path for pattern in NOT_KEPT for path in source.glob(pattern)}
    for path in sorted({path for pattern in KEPT for path in source.glob(pattern)} - dropped):
        (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target / path.relative_to(source))


def _weights(run: Path, name: str = WHOLE) -> Tensors:
    """The run's own; none where there is no such file."""
    return Tensors(*[path for path in [run / name] if path.is_file()])


def _labels(config: Config) -> list[str]:
    """Their names, by number; those that nobody named are LABEL_0, LABEL_1, ..."""
    if not config.get("id2label"):
        return [f"LABEL_{i}" for i in range(int(config.get("num_labels") or 2))]
    if not all(number.isdecimal() for number in config["id2label"]):
        raise UserError("config.json: id2label names labels by other things than their numbers")
    return [str(name) for _, name in sorted(config["id2label"].items(), key=lambda item: int(item[0]))]


def _numbered(labels: list[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(labels)}


def _ticker(plan: Mapping[str, Known], tick: Tick) -> Callable[[int], None]:
    whole, done = sum(map(size_of, plan.values())), 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        tick(done, whole)

    return advance
