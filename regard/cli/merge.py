"""`regard merge`: a model that was fine-tuned with LoRA as a plain one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import AsJson, app, dump


@app.command()
def merge(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run that was trained with --lora.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder, to be used as the run was.")],
    as_json: AsJson = False,
) -> None:
    """Add LoRA's small maps to the model that they stand beside."""
    from regard.passes.lora import merge_run

    merge_run(run, out)
    if as_json:
        return dump({"run": str(run), "out": str(out)})
    typer.echo(f"{out}: a plain model that answers as {run} does")
