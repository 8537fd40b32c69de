"""Make the recipe of a new run: from a named recipe, or from another run that is fine-tuned, with a head for a new
task.

Fine-tuning takes over the model except for its head, the weights and the tokenizer. Devlin et al. 2019,
arXiv:1810.04805.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from regard.convert import Family, every_family
from regard.core import Model, UserError
from regard.errors import in_one_line, nearest, short
from regard.files import recipe as recipes
from regard.runs import checkpoint
from regard.runs.folder import read_run_json
from regard.runs.job import Job

TASKS = {"classify": "classify", "match": "classify", "tag": "tag"}  # task -> part of its head
# The [train] settings that fine-tuning takes over from the original run.
INHERITED = ("batch_tokens", "batch_size", "context_length", "label_smoothing", "precision", "gradient_checkpointing")
FINE_TUNING = {  # defaults of the other [train] settings, careful not to forget what was learned
    "optimizer": "adamw", "lr": 5e-5, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "schedule": "linear",
    "warmup": 50,
}  # fmt: skip
LORA = {"lr": 5e-4}  # LoRA matrices begin at zero and need a higher learning rate
HEAD = "head.*"


def recipe_of(job: Job) -> recipes.Recipe:
    """Return the recipe of a new run with its overrides applied."""
    check_task(job.task)
    if job.origin is None:
        if job.lora:
            raise UserError("LoRA adds small matrices to a trained model: name one with --from")
        made, name = recipes.load(job.recipe, job.size), recipes.display_name(job.recipe)
    else:
        made, name = _from_run(job, Path(job.origin)), short(job.origin)
    try:
        if job.task is not None:
            set_task(made, job.task, _family(job))
        if job.lora:
            _add_lora(made, job.lora, job.task is not None)
        for text in job.overrides:
            recipes.override(made, text)
    except UserError as error:
        raise error.of(name) from None
    return made


def check_task(task: str | None) -> None:
    """Refuse an unknown --task."""
    if task is not None and task not in TASKS:
        raise UserError(f"unknown task '{task}'{nearest(task, TASKS)}")


def given_settings(job: Job, recipe: recipes.Recipe) -> set[str]:
    """Return the keys, such as train.lr, that automatic.py must not choose.

    These are the overrides and all entries of the user's own recipe file; the [train] of a built-in recipe, except when
    a run is fine-tuned for a new task; and, where fine-tuning keeps the task, the INHERITED settings.

    recipe: as `recipe_of` returns it.
    """
    given = {text.partition("=")[0].strip() for text in job.overrides}
    if job.recipe:
        named = recipes.load(job.recipe, job.size)
        sections = ["train"] if not (job.origin and job.task) else []
        if not recipes.is_built_in(job.recipe):
            sections = ["model", "train"]
        given |= {f"{section}.{key}" for section in sections for key in named.get(section, {})}
    if job.origin and not job.task:
        given |= {f"train.{key}" for key in INHERITED if key in recipe.get("train", {})}
    return given


def _from_run(job: Job, folder: Path) -> recipes.Recipe:
    if not folder.is_dir():
        raise UserError(f"there is no run folder '{short(folder)}' to begin from")
    run_info = read_run_json(folder)
    names = ("size", "tokenizer", "vocab", "lowercase")
    for given, what in ((getattr(job, name), f"--{name}") for name in names):
        if given not in (None, False):
            raise UserError(f"--from {short(folder)} brings its model and its tokenizer: leave out {what}")
    if run_info.get("tokenizers") == [] or not any(folder.glob("*tokenizer.json")):
        raise UserError(f"{short(folder)} has no tokenizer, so it cannot learn from texts")
    weights_file(folder)
    made = recipes.load(folder / "recipe.toml")
    before = made.get("train", {})
    made["train"] = {key: before[key] for key in INHERITED if key in before} | FINE_TUNING | (LORA if job.lora else {})
    if job.recipe:
        named = recipes.load(job.recipe)
        if _architecture(named) != _architecture(made):
            raise UserError(
                f"{short(folder)} holds another model than '{recipes.display_name(job.recipe)}' describes: leave out "
                "the recipe, which the run has itself"
            )
        made["train"] |= named.get("train", {})
    return made


def _architecture(recipe: recipes.Recipe) -> Any:
    """Return what a model is made of apart from sizes: its kind, and the parts of its layers."""
    model = recipe["model"]
    layers = [table.get("layer", []) for table in (model, model.get("encoder", {}), model.get("decoder", {}))]
    branches = [
        {name: spec if isinstance(spec, str) else spec.get("part") for name, spec in layer.items()}
        for some in layers
        for layer in (some if isinstance(some, list) else [some])
    ]
    return model.get("kind"), branches


def _family(job: Job) -> Family | None:
    """Return the Hugging Face family of the model, which knows the usual head of a task; None: there is none."""
    if job.origin is None:
        return next((one for one in every_family().values() if one.recipe_name == job.recipe), None)
    return every_family().get((read_run_json(Path(job.origin)).get("origin") or {}).get("family", ""))


def set_task(recipe: recipes.Recipe, task: str, family: Family | None = None) -> None:
    """Replace the head and the objective of a recipe by those of a task. A head of the same part keeps its
    arguments."""
    model = recipe["model"]
    kind = model.get("kind")
    if kind == "encoder-decoder":
        raise UserError(f"the task '{task}' is for an encoder or a decoder, and this model is an encoder-decoder")
    if task == "tag" and kind != "encoder":
        raise UserError("tagging needs an encoder, which sees both sides of a word, and this model is a decoder")
    before = model.get("head", {})
    before = {"part": before} if isinstance(before, str) else before
    head: dict[str, Any] = {"part": TASKS[task], "dropout": model.get("dropout", 0.0)}
    if head["part"] == "classify":
        head["pool"] = before.get("pool", "mean" if kind == "encoder" else "last")
    if task == "match" and before.get("part") == "compare":
        head = before
    elif before.get("part") == head["part"]:
        head |= before
    elif family is not None:
        head |= family.new_head(task, model)
    model["head"] = head | {"classes": 2}  # until the data is read
    model.pop("tie", None)
    recipe.pop("decode", None)
    recipe["objective"] = {"part": task}
    for one in model.get("passes", []):
        if isinstance(one, dict) and one.get("part") == "lora":
            one["learn"] = [HEAD]


def _add_lora(recipe: recipes.Recipe, rank: int, new_head: bool) -> None:
    passes = recipe["model"].setdefault("passes", [])
    if any(one == "lora" or (isinstance(one, dict) and one.get("part") == "lora") for one in passes):
        raise UserError("this run has LoRA matrices already: merge them first (regard merge), or leave out --lora")
    passes.append({"part": "lora", "rank": rank, "alpha": 2.0 * rank} | ({"learn": [HEAD]} if new_head else {}))


def weights_file(folder: Path) -> Path:
    """Return the file with a run's weights: the final ones, or those of its newest checkpoint."""
    final = checkpoint.final_weights(folder)
    if final is not None:
        return final
    newest = checkpoint.newest(folder / "checkpoints").path
    if newest is None:
        raise UserError(f"{short(folder)} holds no model yet, so there is nothing to begin from")
    return newest / checkpoint.MODEL


def load_weights(model: Model, folder: Path, new: Sequence[str]) -> None:
    """Load the weights of a run into a model, one tensor at a time. new: patterns of the names that are not loaded."""
    path = weights_file(folder)
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor

    def is_new(name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in new)

    try:
        with safe_open(str(path), "pt") as file, torch.no_grad():
            left = {name for name in file.keys() if not is_new(name)}  # noqa: SIM118
            for key, mine in names.items():
                found = next((name for name in mine if name in left), None)
                if found is not None:
                    _check_shape(folder, found, file.get_slice(found).get_shape(), tensors[key])
                    tensors[key].copy_(file.get_tensor(found))
                    left -= set(mine)
                elif not all(map(is_new, mine)):
                    raise UserError(f"{short(folder)} has no '{mine[0]}', which this model has")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{short(path)} cannot be read: {in_one_line(error)}") from None
    if left:
        raise UserError(f"{short(folder)} has '{min(left)}', which this model does not have")


def _check_shape(folder: Path, name: str, found: Sequence[int], tensor: Tensor) -> None:
    if tuple(found) != tuple(tensor.shape):
        raise UserError(
            f"{name} is {tuple(found)} in {short(folder)} and {tuple(tensor.shape)} here: the models differ"
        )
