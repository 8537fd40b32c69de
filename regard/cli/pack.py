"""`regard pack`: store the weights of a trained BitNet in two bits each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import AsJson, app, dump


@app.command()
def pack(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run that was trained with the pass bitnet.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new run folder.")],
    rest: Annotated[
        str,
        typer.Option(
            metavar="float32|bfloat16|float16", help="Type of all other weights. Only float32 changes no logits."
        ),
    ] = "float32",
    as_json: AsJson = False,
) -> None:
    """Pack a BitNet's ternary weights, four to a byte."""
    from regard.passes.bitnet import pack as packed

    sizes = packed(run, out, rest)
    if as_json:
        return dump({"run": str(run), "out": str(out), **sizes._asdict()})
    before, after = (f"{size / 1e6:,.2f} MB" for size in sizes)
    typer.echo(f"{out}: {before} became {after}, {sizes.before / sizes.after:.1f} times smaller")
