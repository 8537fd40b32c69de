"""`regard distill`: write what a teacher answers to the sources of some data, to train another model on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from regard.errors import UserError

from .app import AsJson, Parts, Threads, app, dump
from .bar import counting
from .evaluate import examples
from .predict import (
    Beam,
    Device,
    Ensemble,
    Int8,
    LengthPenalty,
    MaxNewTokens,
    NumReturn,
    Shortlist,
    Temperature,
    TopK,
    TopP,
    decode_config,
    open_run,
)
from .train import BadLines, Columns, Data, Header, Source, Target


@app.command()
def distill(
    teacher: Annotated[Path, typer.Argument(metavar="TEACHER", help="The run folder of an encoder-decoder.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The pairs: a .tsv or a .jsonl file.")],
    data: Data = None,
    source: Source = None,
    target: Target = None,
    columns: Columns = None,
    header: Header = None,
    part: Annotated[
        str, typer.Option(metavar="train|dev|test", help="Which part of a folder or of the teacher's data.")
    ] = "train",
    bad_lines: BadLines = "refuse",
    beam: Beam = None,
    length_penalty: LengthPenalty = None,
    num_return: NumReturn = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    samples: Annotated[int, typer.Option(min=1, help="Random answers to each source, with --temperature.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling; 1 if none is given.")] = None,
    max_new_tokens: MaxNewTokens = None,
    shortlist: Shortlist = False,
    ensemble: Ensemble = None,
    device: Device = "cpu",
    threads: Threads = 0,
    int8: Int8 = False,
    parts: Parts = None,
    as_json: AsJson = False,
) -> None:
    """Write a teacher's answers as training data (sequence-level distillation). A killed call is repeated and goes on.

    The sources are those of the teacher's own training data, unless others are named."""
    from regard.distill import check_teacher
    from regard.distill import distill as write

    loaded = open_run(teacher, device, parts, int8, ensemble)
    check_teacher(loaded)
    config = decode_config(
        loaded, {}, beam=beam, length_penalty=length_penalty, num_return=num_return, temperature=temperature,
        top_k=top_k, top_p=top_p, seed=seed, max_new_tokens=max_new_tokens, shortlist=shortlist or None,
    )  # fmt: skip
    if (seed is not None or samples > 1) and not config.samples:
        raise UserError("--seed and --samples are for answers that are drawn at random: say --temperature as well")
    lines = examples(loaded, data, source, target, columns, part, bad_lines, header)
    with counting("distilling", lines.count, Console(stderr=True)) as tick:
        done = write(loaded, lines, out, config, samples, tick)
    if as_json:
        return dump({"out": str(out)} | done._asdict())
    typer.echo(f"{out}: {done}")
    typer.echo(f"train on it: regard train RECIPE --data {out}, or in one go: regard train RECIPE --teacher {teacher}")
