"""Read a run folder: its run.json, its tokenizers and its model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch

from regard.core import Model, UserError, build, restore, save
from regard.core.recipe import check_weights_size
from regard.data.layout import Layout
from regard.data.tokenizer import Marks, Tokenizer
from regard.errors import in_one_line, short
from regard.files.paths import check_run_folder, copy_files
from regard.files.reading import read_json

from . import checkpoint
from .job import Job


class OriginFamily(TypedDict):
    """The required entry of `Origin`: the Hugging Face family."""

    family: str


class Origin(OriginFamily, total=False):
    """Where a converted model came from."""

    config: dict[str, Any]
    tensors: list[str]


class RunInfo(TypedDict, total=False):
    """The entries of run.json that are used."""

    job: Job
    tokenizers: list[str] | None
    documents: bool
    marks: Marks | None
    target_marks: Marks | None
    labels: list[str]
    origin: Origin | None
    images: dict[str, Any]
    sessions: list[Any]
    table: Layout | None


class StoredRun(NamedTuple):
    """The contents of a run folder, checked to belong together.

    source, target: the tokenizers; None: the model reads no tokens.
    info:           the contents of run.json.
    note:           a sentence about a run that is not finished; empty if it is.
    """

    folder: Path
    model: Model
    source: Tokenizer | None
    target: Tokenizer | None
    info: dict[str, Any]
    note: str

    @property
    def documents(self) -> bool:
        """Return whether a language model was trained on separate texts, not on one running text."""
        return bool(self.info.get("documents", True))

    @property
    def converted(self) -> bool:
        """Return whether the model was converted from another library."""
        return "origin" in self.info


def read_run(folder: Path, device: str = "cpu") -> StoredRun:
    """Return the model of a run folder with its tokenizers; of an unfinished run, the newest checkpoint. Tokenizers
    that do not belong to the model are refused."""
    if not folder.is_dir():
        raise UserError(f"there is no run folder '{short(folder)}'")
    info = read_run_json(folder)
    reads_tokens = info.get("tokenizers") != []
    source, target = load_tokenizers(folder) if reads_tokens else (None, None)
    check_device(device)
    finished = checkpoint.final_weights(folder) is not None
    model, note = (restore(folder, device), "") if finished else _unfinished(folder, device)
    stored = StoredRun(folder, model, source, target, info, note)
    if reads_tokens:
        _check_tokenizers(stored)
    return stored


def _check_tokenizers(stored: StoredRun) -> None:
    """Refuse tokenizers whose size differs from that of the embeddings, or that are not those of the training."""
    folder, model, source, target, info, _ = stored
    assert source is not None
    assert target is not None
    hashes = info.get("tokenizers") or [None, None]
    # the target tokens are labels, after the special tokens
    classes = getattr(getattr(model, "head", None), "classes", None)
    said = model.vocab if classes is None else target.size - target.num_labels + classes
    sides = (("source", source, model.source_vocab, hashes[0]), ("target", target, said, hashes[-1]))
    for side, tokenizer, size, known in sides:
        # other libraries pad their embeddings
        if tokenizer.size > size or (tokenizer.size < size and not stored.converted):
            raise UserError(
                f"{short(folder)}: the {side} tokenizer has {tokenizer.size} tokens and the model {size}: they do not "
                "belong together"
            )
        if known is not None and tokenizer.hash() != known:
            raise UserError(f"{short(folder)}: the {side} tokenizer is not the one that this model was trained with")


def _unfinished(folder: Path, device: str) -> tuple[Model, str]:
    """Return the model of the newest undamaged checkpoint, and a sentence about it."""
    path, _, complaints = checkpoint.newest(folder / "checkpoints")
    if path is None:
        why = f" ({complaints[0]})" if complaints else ""
        raise UserError(f"{short(folder)} holds no model yet, neither a finished one nor a whole checkpoint{why}")
    check_weights_size(folder / "recipe.toml", path / checkpoint.MODEL)
    model = build(folder / "recipe.toml")
    checkpoint.read(path, model)
    note = f"this run is not finished: this is the model of step {checkpoint.step_of(path):,}"
    return model.to(device), "; ".join([note, *complaints])


def load_tokenizers(folder: Path) -> tuple[Tokenizer, Tokenizer]:
    """Return the tokenizers of source and target, one object if they are shared."""
    info = read_run_json(folder)
    marks = info.get("marks")  # of a converted model
    joint = folder / "tokenizer.json"
    if joint.is_file():
        one = Tokenizer.load(joint, marks)
        return one, one
    source, target = (folder / f"{side}.tokenizer.json" for side in ("source", "target"))
    if marks is not None and not source.is_file():
        raise UserError(f"{short(folder)} holds no tokenizer.json, and texts cannot be read without one: put it there")
    return Tokenizer.load(source, marks), Tokenizer.load(target, info.get("target_marks", marks))


def read_run_json(folder: Path) -> dict[str, Any]:
    """Return the contents of run.json."""
    path = folder / "run.json"
    check_run_folder(folder)
    if not path.is_file():
        raise UserError(f"{short(folder)} is not a run folder: it holds no run.json (a model alone: regard.restore)")
    return read_json(path, RunInfo)


def check_device(device: str) -> None:
    """Refuse a device that is not available."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"there is no device '{device}' here: {in_one_line(error)}") from None


def save_derived(model: Model, run: Path, out: Path) -> None:
    """Save a model derived from that of a run, with the tokenizers and JSON files of the run."""
    check_run_folder(run)
    out.mkdir(parents=True, exist_ok=True)
    for path in run.glob("*.json"):
        shutil.copy(path, out)
    copy_origin(run, out)
    save(model, out)


def copy_origin(run: Path, out: Path) -> None:
    """Copy the original files of a converted model, which are needed to convert it back."""
    if (run / "origin").is_dir():
        copy_files(run / "origin", out / "origin")
