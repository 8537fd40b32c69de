"""`regard evaluate`: measure a trained model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.errors import UserError, printable

from .app import AsJson, Parts, Threads, app, dump
from .bar import counting
from .predict import (
    Beam,
    Device,
    EarlyStopping,
    Ensemble,
    Int8,
    Iterations,
    LengthBeam,
    LengthPenalty,
    MaxNewTokens,
    Rescore,
    RunFolder,
    Shortlist,
    Strategy,
    decode_config,
    open_run,
)  # fmt: skip
from .train import AnyReference, BadLines, Columns, Data, Header, Source, Target

FOUR_DECIMALS = ("loss", "perplexity", "bits_per_character", "bits_per_byte")


@app.command()
def evaluate(
    run: RunFolder,
    data: Data = None,
    source: Source = None,
    target: Target = None,
    columns: Columns = None,
    header: Header = None,
    part: Annotated[
        str, typer.Option(metavar="train|dev|test", help="Which part of a folder or of the run's data.")
    ] = "test",
    metric: Annotated[
        list[str] | None, typer.Option(help="loss, perplexity, bits_per_character, bleu, exact, ...")
    ] = None,
    tokenize: Annotated[str | None, typer.Option(help="sacreBLEU's: 13a, none, intl, zh, ...")] = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Compare without case.")] = False,
    any_reference: AnyReference = False,
    beam: Beam = None,
    length_penalty: LengthPenalty = None,
    early_stopping: EarlyStopping = None,
    max_new_tokens: MaxNewTokens = None,
    strategy: Strategy = None,
    iterations: Iterations = None,
    length_beam: LengthBeam = None,
    rescore: Rescore = None,
    memory: Annotated[
        int | None, typer.Option(help="Earlier positions that a language model may attend to; 0: none.")
    ] = None,
    bad_lines: BadLines = "refuse",
    shortlist: Shortlist = False,
    ensemble: Ensemble = None,
    device: Device = "cpu",
    threads: Threads = 0,
    int8: Int8 = False,
    parts: Parts = None,
    as_json: AsJson = False,
) -> None:
    """Measure a trained model on data: sacreBLEU, chrF, TER, exact match, error rates, perplexity."""
    from regard.evaluate import evaluate as measured

    loaded = open_run(run, device, parts, int8, ensemble)
    config = decode_config(
        loaded, {"rescore": rescore}, beam=beam, length_penalty=length_penalty, early_stopping=early_stopping,
        max_new_tokens=max_new_tokens, shortlist=shortlist or None, strategy=strategy, iterations=iterations,
        length_beam=length_beam,
    )  # fmt: skip
    lines = examples(loaded, data, source, target, columns, part, bad_lines, header)
    if memory is not None and hasattr(loaded, "evaluate"):
        raise UserError("--memory is for a language model that reads a running text, and this model is not one")
    with counting("evaluating", None, Console(stderr=True)) as tick:
        result = measured(
            loaded, lines, metric or None, config, any_reference, tick, tokenize, lowercase, memory
        )  # fmt: skip
    if as_json:
        return dump({"run": str(run), "data": lines.name, "part": _part_name(loaded, data, source, part)} | result)
    which, where = _part_name(loaded, data, source, part), printable(lines.name.removesuffix(f", {part}"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_column("signature", style="dim")
    for name, value in result["scores"].items():
        table.add_row(
            name, f"{value:.4f}" if name in FOUR_DECIMALS else f"{value:.2f}", result["signatures"].get(name, "")
        )
    out = Console()
    out.print(Text(f"{'all' if which == 'all' else f'the {which} part'} of {where}", style="bold"), soft_wrap=True)
    out.print(table)
    out.print(", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in result["counts"].items()), style="dim")
    for note in result.get("notes", []):
        print(f"regard: {printable(note)}", file=sys.stderr)


def examples(
    loaded: Any,
    data: str | None,
    source: str | None,
    target: str | None,
    columns: str | None,
    part: str,
    bad_lines: str,
    header: str | None = None,
) -> Any:
    """Return the examples to measure on: a part of the named data, or of the data that the run was trained on."""
    from regard.data import open_corpus
    from regard.runs.folder import read_run_json

    if part not in ("train", "dev", "test"):
        raise UserError(f"--part is train, dev or test, not '{part}'")
    asked: dict[str, Any] = {"data": data, "source": source, "target": target, "columns": columns}
    asked |= {"dev": None, "test": None, "bad_lines": bad_lines}
    own = data is None and source is None
    if own:
        job = read_run_json(loaded.folder).get("job", {})
        if job.get("data") is None and job.get("source") is None:
            raise UserError("this run does not record its training data: name some with --data")
        asked = {name: job.get(name, value) for name, value in asked.items()}
        header = job.get("header")
    asked["header"] = header
    if hasattr(loaded, "examples"):  # it reads its data in its own way
        return loaded.examples(asked | {"own": own}, part)
    kind = getattr(loaded, "reads", "pairs") if loaded.pairs else "text"
    if not own and columns is None and source is None and target is None:
        return _as_trained(loaded, data, part, bad_lines, header, kind)
    if own:
        corpus = open_corpus(**asked, kind=kind, seed=loaded.model.recipe.get("train", {}).get("seed", 1))
    else:
        return _open_named(data, source, target, columns, part, bad_lines, header, kind)
    return _part(corpus, part)


def _as_trained(loaded: Any, data: str, part: str, bad_lines: str, header: str | None, kind: str) -> Any:
    """Return the examples of a file, from the run's columns if the file has those, else from the usual ones."""
    from regard.data.folder import exists, first_training_file
    from regard.data.layout import layout_in, matching
    from regard.runs.folder import read_run_json

    layout = layout_in(read_run_json(loaded.folder)) if loaded.folder else None
    if layout is None or not exists(Path(data)):
        return _open_named(data, None, None, None, part, bad_lines, header, kind)
    said = f"the run was trained with --columns {','.join(layout.get('taken', []))}"
    try:
        place = first_training_file(Path(data))
        columns = matching(place[0], layout) if len(place) == 1 and place[0].is_file() else None
        return _open_named(data, None, None, columns, part, bad_lines, header, kind)
    except UserError as error:
        raise UserError(f"{error.message}; {said}") from None


def _open_named(
    data: str | None,
    source: str | None,
    target: str | None,
    columns: Any,
    part: str,
    bad_lines: str,
    header: str | None,
    kind: str,
) -> Any:
    from regard.data import open_corpus

    if data is not None and Path(data).is_dir():
        corpus = open_corpus(data, source, target, columns=columns, kind=kind, bad_lines=bad_lines, header=header)
        return _part(corpus, part)
    return open_corpus(data, source, target, 0, 0, columns, kind, bad_lines, header=header).train


def _part(corpus: Any, part: str) -> Any:
    lines = getattr(corpus, part)
    if lines is None:
        raise UserError(f"there is no {part} part in this data: name a file with --data")
    return lines


def _part_name(loaded: Any, data: str | None, source: str | None, part: str) -> str:
    """Return which part `examples` returns: train, dev or test, or all for files without parts."""
    if data is None:
        return part if source is None else "all"
    if loaded.takes == "images":
        return part if any((Path(data) / one).exists() for one in ("train", part)) else "all"
    return part if hasattr(loaded, "examples") or Path(data).is_dir() else "all"
