"""`regard demo`: train a model that pronounces English in a few minutes, and show what it does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .app import app


@app.command()
def demo(
    minutes: Annotated[float | None, typer.Option(help="Training time; 3, or 30 with --full.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Train a larger, better model for half an hour.")] = False,
    out: Annotated[
        Path, typer.Option(metavar="RUN", help="The run folder; that of an earlier demo is replaced.")
    ] = Path("runs/demo"),
    threads: Annotated[int, typer.Option(help="0: as many as there are cores.")] = 0,
) -> None:
    """Train a model from English spelling to pronunciation on the CMU dictionary, test it, and draw its attention."""
    from regard import demo as demo_job
    from regard.decode import DecodeConfig
    from regard.look.alignment import png
    from regard.train import job as jobs

    from .bar import Bar

    console = Console()
    bar = Bar(console, demo_job.METRICS)
    if (out / "demo").exists():
        shutil.rmtree(out)
    job = demo_job.job(out, minutes or (30.0 if full else 3.0), full)
    job.threads = threads
    with bar.running():
        prepared = jobs.start(job, bar.say, bar.tick)
        (out / "demo").touch()
        size = sum(p.numel() for p in prepared.model.parameters())
        bar.say(f"{size:,} parameters, {prepared.corpus.train.count:,} examples")
        run = prepared.train(bar.report)
    test = prepared.corpus.test
    assert test is not None
    with console.status("testing"):
        report = demo_job.evaluate_words(run, test)
        word, answer = demo_job.clearest_example(run, test)
        said = run.predict(demo_job.WORDS, DecodeConfig(beam=4))
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 3, 0, 0))
    half = (len(demo_job.WORDS) + 1) // 2
    for i in range(half):
        cells = [text for k in (i, i + half) for text in (demo_job.WORDS[k], said[k][0].text)]
        table.add_row(*cells)
    console.print(table)
    picture = out / "alignment.png"
    assert answer.alignment is not None
    png(answer.alignment.weights, answer.alignment.source, answer.alignment.target, picture)
    console.print(f"\nwhere the decoder looked while it pronounced '{word}': {picture}")
    console.print(f"on {report.words:,} words that it has never seen:", highlight=False)
    console.print(f"word error {report.word_error:.1f} %", highlight=False)
    console.print(f"phoneme error {report.phoneme_error:.1f} %", highlight=False)
    console.print(
        f"\nnext:\n  echo chrysanthemum | .venv/bin/regard predict {out} --num-return 3\n"
        f"  .venv/bin/regard evaluate {out} --any-reference\n"
        "  .venv/bin/regard train --data YOUR.tsv --minutes 10",
        highlight=False,
    )
