"""`regard profile`: measure time and memory by part."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.errors import UserError, printable

from .app import AsJson, Parts, Sets, Size, Threads, app, dump
from .catalog import VOCAB, errors_about, load_recipe, parse_vocab


@app.command()
def profile(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE.toml|RUN", help="A recipe, or a run folder.")],
    size: Size = None,
    sets: Sets = None,
    vocab: Annotated[str | None, typer.Option(metavar="N", help="Vocabulary: a number, or source,target.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Sequences in the batch.")] = 16,
    length: Annotated[int, typer.Option(min=2, help="Positions of each sequence.")] = 64,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps, ...")] = "cpu",
    threads: Threads = 0,
    parts: Parts = None,
    as_json: AsJson = False,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw it into this file.")] = None,
) -> None:
    """Measure the time and the memory of one training step and one decoding step, by part."""

    from regard import build, restore
    from regard.look import picture
    from regard.look import profile as measure
    from regard.runs.folder import check_device
    from regard.runs.settings import Settings

    check_device(device)
    if png is not None:
        picture.check_path(png)
    if Path(name).is_dir():
        if size or sets or vocab:
            raise UserError("a run folder has its size already: --size, --set and --vocab are for recipes")
        model = restore(name)
    else:
        recipe = load_recipe(name, size, sets, parts, parse_vocab(vocab) or VOCAB, vocab is not None)
        with errors_about(name):
            model = build(recipe)
    settings = Settings.read(getattr(model, "recipe", {}).get("train", {}))
    model = model.to(device)
    steps = [("training step", measure.profile_training(model, rows, length, settings))]
    if (decoding := measure.profile_decoding(model, rows, length)) is not None:
        steps.append(("decoding step", decoding))
    if png is not None:
        measure.png([(f"{name}, {title}", step) for title, step in steps], png)
    if as_json:
        return dump({title: asdict(step) for title, step in steps})
    console = Console()
    for title, step in steps:
        console.print(_table(f"{title}: {rows} rows, {length} positions", step))
        held = ", ".join(f"{what} {_size(size)}" for what, size in step.memory.items())
        speed = step.tokens / step.seconds
        console.print(f"{1000 * step.seconds:.1f} ms, {speed:,.0f} tokens/s; {held}\n")
    if png is not None:
        console.print(Text(f"drawn in {png}"))


def _table(title: str, step: Any) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=title, title_justify="left")
    learns = any(row.backward for row in step.rows)
    table.add_column("part")
    for column in ("share", *(("forward", "backward") if learns else ("time",)), "kept" if learns else "state"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in step.rows:
        share = (row.forward + row.backward) / step.seconds
        times = [f"{1000 * t:.2f} ms" for t in ((row.forward, row.backward) if learns else (row.forward,))]
        table.add_row(Text(printable(row.part)), f"{share:.1%}", *times, _size(row.kept) if row.kept else "")
    return table


def _size(size: int) -> str:
    return f"{size / 2**20:,.1f} MB" if size >= 2**20 else f"{size / 2**10:,.1f} kB"
