"""Load a run folder as an object that makes predictions with its model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.core import UserError
from regard.decode import Ensemble
from regard.decode.int8 import quantize
from regard.errors import short
from regard.runs.folder import read_run
from regard.schema import takes

from . import predictor_for
from .nodes import NodeClassifier
from .reader import Reader
from .run import Run


def load(
    folder: str | Path | Sequence[str | Path], device: str = "cpu", int8: bool = False
) -> Run | Reader | NodeClassifier:
    """Load a run folder, or several as an ensemble. An unfinished run gives its newest checkpoint, and its `note` says
    so.
    int8: quantize the weights to eight bits; see decode/int8.py."""
    folders = [Path(folder)] if isinstance(folder, str | Path) else [Path(one) for one in folder]
    loaded = [_load(one, device) for one in folders]
    if int8:
        for one in loaded:
            quantize(one.model)
    return loaded[0] if len(loaded) == 1 else _ensemble(loaded)


def _ensemble(runs: Sequence[Any]) -> Run:
    """Return one run that answers with the models of all."""
    if not runs:
        raise UserError("there is no run folder to load")
    first = runs[0]
    for run in runs:
        if type(run) is not Run:
            raise UserError(
                f"{short(run.folder)}: only models that write texts, one token after the other, answer together"
            )
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
    return Run(model, first.source, first.target, first.folder, first.documents, notes, first.converted)


def _load(folder: Path, device: str) -> Run | Reader | NodeClassifier:
    stored = read_run(folder, device)
    model, source, target, note = stored.model, stored.source, stored.target, stored.note
    predictor = predictor_for(model)
    if source is None:
        if takes(predictor, "source"):
            raise UserError(f"{short(folder / 'run.json')}: tokenizers is empty, and this model reads texts")
        return predictor(model, folder, note)
    if predictor is Run:
        return Run(model, source, target, folder, stored.documents, note, stored.converted)
    return predictor(model, source, target, folder, note)
