"""`regard convert`: import and export Hugging Face weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import DownloadColumn, Progress, TransferSpeedColumn
from rich.text import Text

from regard.errors import printable

from .app import AsJson, app, dump


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A folder in the Hugging Face layout, or a run.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="A new folder: a run, or the Hugging Face layout.")],
    check: Annotated[
        bool, typer.Option("--check", help="Compare with `transformers`, where that is installed.")
    ] = False,
    to: Annotated[
        str | None, typer.Option(metavar="FAMILY", help="The family as which to export a run that was trained here.")
    ] = None,
    pickle: Annotated[bool, typer.Option("--pickle", help="Read torch.save files, tensors only.")] = False,
    shard: Annotated[float, typer.Option(metavar="GB", help="Largest file of an export.")] = 5.0,
    as_json: AsJson = False,
) -> int:
    """Turn Hugging Face weights into a run, or a run into Hugging Face weights."""
    from regard.convert import convert as converted

    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:2], DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("converting", total=None)
        done = converted(
            source,
            target,
            pickle,
            to,
            int(shard * 1e9),
            lambda n, total: progress.update(task, completed=n, total=total),
        )
    result = {"family": done.family, "folder": str(done.folder), "tensors": done.tensors, "parameters": done.parameters}
    result |= {"note": done.note} if done.note else {}
    holds = True
    if check:
        from regard.convert.check import check as checked

        outcome = checked(*((target, source) if (target / "run.json").is_file() else (source, target)))
        result["check"], holds = outcome._asdict(), outcome.holds
    if as_json:
        dump(result)
        return 0 if holds else 1
    typer.echo(f"{done.folder}: a {done.family} of {done.parameters / 1e6:,.1f} M parameters, {done.tensors} tensors")
    if done.note:
        console.print(Text(printable(f"note: {done.note}")))
    if check:
        word = "the same as transformers" if holds else "NOT the same as transformers"
        typer.echo(f"{word}: {outcome.what} differ by at most {outcome.worst:.1e}; the largest is {outcome.size:.3g}")
    return 0 if holds else 1
