"""A run folder from outside: what it holds, and the face that answers with its model."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from regard.core import Model, UserError, build, restore
from regard.core.recipe import must_match
from regard.data.layout import Layout
from regard.data.tokenizer import Marks, Tokenizer
from regard.decode import Ensemble
from regard.decode.int8 import quantise
from regard.errors import in_one_line, nearest, short, shown
from regard.files.paths import check_run_folder
from regard.files.reading import read_json
from regard.run import Run
from regard.schema import takes
from regard.train import checkpoint
from regard.train.asked import Job

if TYPE_CHECKING:
    from regard.use.nodes import NodeLabeller
    from regard.use.reader import Reader


class Made(TypedDict):
    """By what kind of model elsewhere."""

    family: str


class Origin(Made, total=False):
    """Where a model came from that was made elsewhere."""

    config: dict[str, Any]
    tensors: list[str]


class Told(TypedDict, total=False):
    """The entries of run.json that something is read from."""

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


def load(
    folder: str | Path | Sequence[str | Path], device: str = "cpu", int8: bool = False
) -> Run | Reader | NodeLabeller:
    """A run folder, as `regard train` leaves it, or several whose models answer together. One that was stopped early
    gives its newest checkpoint, and its `note` says so. int8: with weights of eight bits: see kernels/int8.py."""
    folders = [Path(folder)] if isinstance(folder, str | Path) else [Path(one) for one in folder]
    loaded = [_load(one, device) for one in folders]
    if int8:
        for one in loaded:
            quantise(one.model)
    return loaded[0] if len(loaded) == 1 else _together(loaded)


def _together(runs: Sequence[Any]) -> Run:
    """One that answers with the models of all."""
    if not runs:
        raise UserError("there is no run folder to load")
    first = runs[0]
    for run in runs:
        if type(run) is not Run:
            raise UserError(f"{short(run.folder)}: only models that write texts answer together")
        if run.model.kind != first.model.kind:
            raise UserError(
                f"{short(run.folder)} is of kind '{run.model.kind}' and {short(first.folder)} of kind "
                f"'{first.model.kind}', so their models cannot answer together"
            )
        if any(a.hash() != b.hash() for a, b in ((run.source, first.source), (run.target, first.target))):
            raise UserError(
                f"{short(run.folder)} and {short(first.folder)} have tokenizers that differ, so their models cannot "
                "answer together: train them with the same tokenizer.json"
            )
    notes = "; ".join(f"{short(run.folder)}: {run.note}" for run in runs if run.note)
    model: Any = Ensemble([run.model for run in runs])
    return Run(model, first.source, first.target, first.folder, first.documents, notes, first.foreign)


def _load(folder: Path, device: str) -> Run | Reader | NodeLabeller:
    if not folder.is_dir():
        raise UserError(f"there is no run folder '{short(folder)}'")
    told = about(folder)
    graph = told.get("tokenizers") == []  # nothing is read in tokens
    source, target = (None, None) if graph else tokenizers(folder)
    must_have(device)
    finished = checkpoint.finished(folder) is not None
    model, note = (restore(folder, device), "") if finished else _unfinished(folder, device)
    if graph:
        if takes(predictor_for(model), "source"):
            raise UserError(f"{short(folder / 'run.json')}: tokenizers is empty, and this model reads texts")
        return predictor_for(model)(model, folder, note)
    assert source is not None
    assert target is not None
    hashes = told.get("tokenizers") or [None, None]
    head = getattr(model, "head", None)
    classes = getattr(head, "classes", None)  # the target's tokens are labels, after the special ones
    said = model.vocab if classes is None else target.size - target.labels + classes
    sides = (("source", source, model.source_vocab, hashes[0]), ("target", target, said, hashes[-1]))
    for side, tokenizer, size, known in sides:
        if tokenizer.size > size or (tokenizer.size < size and "origin" not in told):  # others pad their tables
            raise UserError(
                f"{short(folder)}: the {side} tokenizer has {tokenizer.size} tokens and the model {size}: they do not "
                "belong together"
            )
        if known is not None and tokenizer.hash() != known:
            raise UserError(f"{short(folder)}: the {side} tokenizer is not the one that this model was trained with")
    predictor = predictor_for(model)
    if predictor is Run:
        return Run(model, source, target, folder, bool(told.get("documents", True)), note, "origin" in told)
    return predictor(model, source, target, folder, note)


def must_have(device: str) -> None:
    """Refuse a device that is not here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"there is no device '{device}' here: {in_one_line(error)}") from None


# What a model has learned, and where it matters what it reads -> module and class in regard/use that answers with it;
# else it is a Run.
FACES = {
    "classify": "label.Labeller",
    "classify images": "images.ImageLabeller",
    "contrastive": "towers.Pairer",
    "match": "match.Matcher",
    "tag": "tag.Tagger",
    "embed": "embed.Embedder",
    "masked": "fill.Filler",
    "nodes": "nodes.NodeLabeller",
    "permuted": "onward.Onward",
    "span_corruption": "spans.SpanFiller",
    "transcribe": "transcribe.Transcriber",
}
WRITERS = ("next_token", "segments")  # what a Run has learned


def predictor_for(model: Model) -> Any:
    """The class that answers with such a model."""
    objective = getattr(model, "recipe", {}).get("objective", {}).get("part", "next_token")
    known = {predictor.split()[0] for predictor in FACES} | set(WRITERS)
    if not isinstance(objective, str) or objective not in known:
        near = nearest(str(objective), known)
        raise UserError(f"recipe.toml: objective.part is {shown(objective)}, which is unknown{near}")
    reads = getattr(getattr(model, "embed", None), "reads", "text")
    module, _, predictor = (FACES.get(f"{objective} {reads}") or FACES.get(objective, "")).partition(".")
    return getattr(import_module(f"regard.use.{module}"), predictor) if predictor else Run


def _unfinished(folder: Path, device: str) -> tuple[Model, str]:
    """The newest whole checkpoint, and a sentence about it."""
    path, _, complaints = checkpoint.newest(folder / "checkpoints")
    if path is None:
        why = f" ({complaints[0]})" if complaints else ""
        raise UserError(f"{short(folder)} holds no model yet, neither a finished one nor a whole checkpoint{why}")
    must_match(folder / "recipe.toml", path / checkpoint.MODEL)
    model = build(folder / "recipe.toml")
    checkpoint.read(path, model)
    note = f"this run is not finished: this is the model of step {checkpoint.step_of(path):,}"
    return model.to(device), "; ".join([note, *complaints])


def tokenizers(folder: Path) -> tuple[Tokenizer, Tokenizer]:
    """The source's and the target's, one and the same when they are joint."""
    told = about(folder)
    marks = told.get("marks")  # of a model that came from elsewhere
    joint = folder / "tokenizer.json"
    if joint.is_file():
        one = Tokenizer.load(joint, marks)
        return one, one
    source, target = (folder / f"{side}.tokenizer.json" for side in ("source", "target"))
    if marks is not None and not source.is_file():
        raise UserError(f"{short(folder)} holds no tokenizer.json, and texts cannot be read without one: put it there")
    return Tokenizer.load(source, marks), Tokenizer.load(target, told.get("target_marks", marks))


def about(folder: Path) -> dict[str, Any]:
    """What run.json says."""
    path = folder / "run.json"
    check_run_folder(folder)
    if not path.is_file():
        raise UserError(f"{short(folder)} is not a run folder: it holds no run.json (a model alone: regard.restore)")
    return read_json(path, Told)
