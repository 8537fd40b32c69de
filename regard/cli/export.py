"""`regard export`: export a run to another program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import AsJson, app, dump


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder.")],
    to: Annotated[str, typer.Option(metavar="ctranslate2|onnx", help="The program that will read it.")] = "ctranslate2",
    numbers: Annotated[
        str | None, typer.Option(metavar="int8|float16|...", help="Number format of CTranslate2's weights.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run as a model of CTranslate2, or as ONNX graphs with a README that shows how to run them."""
    from regard.export import export as write

    files = write(run, out, to, numbers)
    if as_json:
        return dump({"run": str(run), "to": to, "files": {path.name: path.stat().st_size for path in files}})
    for path in files:
        typer.echo(f"{path}  {path.stat().st_size / 1e6:,.2f} MB")
