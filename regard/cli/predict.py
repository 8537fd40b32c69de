"""`regard predict` and `regard evaluate`: a trained model at work, and how good it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from regard import UserError, add_folder

from .app import AsJson, Parts, app, dump
from .train import Anyone, BadLines, Columns, Files, Source, Target

HOW = "How to decode"

TheRun = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, as `regard train` leaves it.")]
Beam = Annotated[int | None, typer.Option(rich_help_panel=HOW, help="Beginnings kept; 1 is greedy.")]
Penalty = Annotated[float | None, typer.Option(rich_help_panel=HOW, help="Exponent of the length.")]
Most = Annotated[int | None, typer.Option("--most", rich_help_panel=HOW, help="New tokens at the most.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, mps, ...")]


@app.command()
def predict(
    run: TheRun,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Texts, one a line; - for standard input.")] = "-",
    beam: Beam = None,
    penalty: Penalty = None,
    best: Annotated[int | None, typer.Option(rich_help_panel=HOW, help="Answers for each line.")] = None,
    temperature: Annotated[float | None, typer.Option(rich_help_panel=HOW, help="Above 0: draw at random.")] = None,
    top_k: Annotated[int | None, typer.Option(rich_help_panel=HOW)] = None,
    top_p: Annotated[float | None, typer.Option(rich_help_panel=HOW)] = None,
    min_p: Annotated[float | None, typer.Option(rich_help_panel=HOW)] = None,
    repetition: Annotated[float | None, typer.Option(rich_help_panel=HOW, help="Above 1: discourage repeats.")] = None,
    seed: Annotated[int | None, typer.Option(rich_help_panel=HOW)] = None,
    most: Most = None,
    cut: Annotated[bool, typer.Option("--cut", rich_help_panel=HOW, help="Shorten inputs that are too long.")] = False,
    align: Annotated[bool, typer.Option("--align", help="With --json: where the decoder looked.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Write the answer as it comes.")] = False,
    device: Device = "cpu",
    parts: Parts = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines with scores, all answers, alignments.")] = False,
) -> None:
    """Answer texts: translate, pronounce, or go on with a prompt."""
    from regard.run import load

    if align and not as_json:
        raise UserError("--align writes matrices: say --json as well")
    loaded = _load(load, run, device, parts)
    way = _way(loaded, beam=beam, penalty=penalty, best=best, temperature=temperature, top_k=top_k, top_p=top_p,
               min_p=min_p, repetition=repetition, seed=seed, most=most, cut=cut or None)  # fmt: skip
    if stream:
        for text in _texts(file):
            for piece in loaded.stream(text, way):
                sys.stdout.write(piece)
                sys.stdout.flush()
            sys.stdout.write("\n")
        return
    ahead = 1 if file == "-" and sys.stdin.isatty() else 4096
    for answers in loaded.answers(_texts(file), way, align, ahead):
        if as_json:
            typer.echo(json.dumps([_plain(answer) for answer in answers], ensure_ascii=False))
        else:
            for answer in answers:
                typer.echo(answer.text)


@app.command()
def evaluate(
    run: TheRun,
    data: Files = None,
    source: Source = None,
    target: Target = None,
    columns: Columns = None,
    part: Annotated[
        str, typer.Option(metavar="train|dev|test", help="Which part of a folder or of the run's data.")
    ] = "test",
    metric: Annotated[list[str] | None, typer.Option(help="loss, perplexity, bleu, chrf, ter, exact, ...")] = None,
    tokenize: Annotated[str | None, typer.Option(help="sacreBLEU's: 13a, none, intl, zh, ...")] = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Compare without case.")] = False,
    any_reference: Anyone = False,
    beam: Beam = None,
    penalty: Penalty = None,
    most: Most = None,
    bad_lines: BadLines = "refuse",
    device: Device = "cpu",
    parts: Parts = None,
    as_json: AsJson = False,
) -> None:
    """Measure a trained model on data: sacreBLEU, chrF, TER, exact match, error rates, perplexity."""
    from regard.evaluate import evaluate as measured
    from regard.run import load

    loaded = _load(load, run, device, parts)
    lines = _lines(loaded, data, source, target, columns, part, bad_lines)
    names = metric or loaded.metrics
    way = _way(loaded, beam=beam, penalty=penalty, most=most)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("evaluating", total=None)
        told = measured(
            loaded, lines, names, way, any_reference, lambda n: progress.advance(task, n), tokenize, lowercase
        )
    if as_json:
        return dump({"run": str(run), "data": lines.name} | told)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("metric")
    table.add_column("value", justify="right")
    table.add_column("signature", style="dim")
    for name, value in told["scores"].items():
        table.add_row(
            name, f"{value:.4f}" if name in ("loss", "perplexity") else f"{value:.2f}", told["signatures"].get(name, "")
        )
    out = Console()
    out.print(table)
    out.print(", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in told["counts"].items()), style="dim")


def _load(load: Any, run: Path, device: str, parts: list[Path] | None) -> Any:
    for folder in parts or []:
        add_folder(folder)
    loaded = load(run, device)
    if loaded.note:
        print(f"regard: {loaded.note}", file=sys.stderr)
    return loaded


def _way(loaded: Any, **given: Any) -> Any:
    from regard.decode import Way

    return Way.read({name: value for name, value in given.items() if value is not None}, loaded.way)


def _texts(file: str) -> Iterator[str]:
    """Lines without their ends."""
    if file == "-":
        lines = sys.stdin.buffer
    elif Path(file).is_file():
        lines = open(file, "rb")  # noqa: SIM115
    else:
        raise UserError(f"there is no file '{file}' to read from")
    with lines:
        for number, line in enumerate(lines, 1):
            try:
                yield line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                where = "standard input" if file == "-" else file
                raise UserError(f"{where}, line {number} is not UTF-8") from None


def _plain(answer: Any) -> dict[str, Any]:
    told = {k: v for k, v in answer._asdict().items() if v is not None}
    if "alignment" in told:
        told["alignment"] = told["alignment"]._asdict()
    return told


def _lines(
    loaded: Any,
    data: str | None,
    source: str | None,
    target: str | None,
    columns: str | None,
    part: str,
    bad_lines: str,
) -> Any:
    """The examples to measure on: a part of what is named, or of the data that the run was trained with."""
    from regard.data import open_corpus
    from regard.data.graph import open_graph
    from regard.nodes import NodeLabeller
    from regard.run import about

    if part not in ("train", "dev", "test"):
        raise UserError(f"--part is train, dev or test, not '{part}'")
    if isinstance(loaded, NodeLabeller):
        nodes = getattr(open_graph(data or about(loaded.folder)["job"]["data"]), part)
        if nodes is None:
            raise UserError(f"this graph says of no node that it is for {part}")
        return nodes
    kind = "pairs" if loaded.pairs else "text"
    if data is None and source is None:
        job = about(loaded.folder)["job"]
        asked = {name: job[name] for name in ("data", "source", "target", "dev", "test", "columns", "bad_lines")}
        corpus = open_corpus(**asked, kind=kind, seed=loaded.model.recipe.get("train", {}).get("seed", 1))
    elif data is not None and Path(data).is_dir():
        corpus = open_corpus(data, source, target, columns=columns, kind=kind, bad_lines=bad_lines)
    else:
        return open_corpus(data, source, target, 0, 0, columns, kind, bad_lines).train
    lines = getattr(corpus, part)
    if lines is None:
        raise UserError(f"there is no {part} part in this data: name a file with --data")
    return lines
