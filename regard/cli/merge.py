"""`regard merge`: merge LoRA matrices into the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import AsJson, app, dump


@app.command()
def merge(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run that was trained with --lora.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new run folder.")],
    as_json: AsJson = False,
) -> None:
    """Merge LoRA's matrices into the model's weights."""
    from regard.passes.lora import merge_run

    merge_run(run, out)
    if as_json:
        return dump({"run": str(run), "out": str(out)})
    typer.echo(f"{out}: a plain model that answers as {run} does")
