"""`regard shortlist`: learn the likely target words of each source word, so that a translator scores few of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Annotated

import typer
from rich.console import Console

from regard.errors import UserError

from .app import AsJson, app, dump
from .bar import counting
from .evaluate import examples
from .predict import RunFolder, open_run
from .train import BadLines, Columns, Data, Source, Target


@app.command()
def shortlist(
    run: RunFolder,
    data: Data = None,
    source: Source = None,
    target: Target = None,
    columns: Columns = None,
    each: Annotated[int, typer.Option(min=1, help="Target tokens for each source token.")] = 30,
    common: Annotated[int, typer.Option(min=0, help="The most frequent target tokens, always added.")] = 200,
    bad_lines: BadLines = "refuse",
    as_json: AsJson = False,
) -> None:
    """Make translation faster: learn the likely target words of each source word, for regard predict --shortlist.

    The pairs are the run's own training data, unless others are named."""
    from regard.decode.shortlist import FILE, Shortlist

    loaded = open_run(run, "cpu", None)
    if not getattr(loaded, "pairs", False) or loaded.takes != "texts":
        raise UserError("a shortlist is for a run that turns a text into another")
    lines = examples(loaded, data, source, target, columns, "train", bad_lines)
    with counting("reading", lines.count, Console(stderr=True)) as tick:

        def pairs() -> Iterator[tuple[list[int], list[int]]]:
            rows = iter(lines)
            while some := list(islice(rows, 1000)):
                tick(len(some))
                sources, targets = (list(side) for side in zip(*some, strict=True))
                yield from zip(loaded.source.encode(sources), loaded.target.encode(targets), strict=True)

        vocab = (loaded.model.source_vocab, loaded.model.vocab)
        always = [*loaded.decoder_prefix, loaded.target.end]
        made = Shortlist.learn(pairs(), vocab, each, common, always)
    path = run / FILE
    made.save(path)
    result = {"shortlist": str(path), "each": each, "common": len(made.common)}
    if as_json:
        return dump(result)
    typer.echo(f"{path}: up to {each} target tokens for each source token, and {len(made.common)} for all")
    typer.echo(f"use it: regard predict {run} --shortlist")
