"""`regard doctor`: report what this machine has, what would make regard faster, and what runs each op of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.errors import UserError, printable, short
from regard.files import recipe as recipes

from .app import AsJson, Parts, Sets, Size, Threads, app, dump
from .catalog import VOCAB, errors_about, load_recipe


@app.command()
def doctor(
    name: Annotated[
        str | None, typer.Argument(metavar="[RUN|NAME|FILE.toml]", help="A run folder, or a recipe: its ops as well.")
    ] = None,
    size: Size = None,
    sets: Sets = None,
    rows: Annotated[int, typer.Option(min=1, help="Sequences in the random batch.")] = 16,
    length: Annotated[int, typer.Option(min=2, help="Positions of each sequence.")] = 64,
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu",
    threads: Threads = 0,
    parts: Parts = None,
    as_json: AsJson = False,
) -> None:
    """Report what this machine has: cores, instruction sets, compiler, kernels, torch, memory; and what would help. For
    a run or a recipe, also report what runs each op, regard's kernels or torch, and why."""
    model = None if name is None else _load_model(name, size, sets, parts, device)
    from regard.doctor import examine, trace_ops
    from regard.memory import format_bytes

    found = examine()
    ops = None if model is None else trace_ops(model, rows, length)
    if as_json:
        return dump(found if ops is None else found | {"ops": {"of": name, "rows": rows, "length": length} | ops})
    found["machine"]["memory"] = format_bytes(found["machine"]["memory"])
    advice = found.pop("advice")
    for section, facts in found.items():
        typer.secho(section, bold=True)
        for key, fact in facts.items():
            if isinstance(fact, bool):
                fact = "yes" if fact else "no"
            text = ", ".join(fact) if isinstance(fact, list) else str(fact)
            if text:
                typer.echo(f"  {key:<17} {text}")
    typer.secho("advice", bold=True)
    for sentence in advice or ["Nothing: everything that regard can use is used."]:
        typer.echo(f"  {sentence}")
    if ops is not None:
        _print_ops(f"{name}, {rows} rows of {length} positions", ops)


def _load_model(name: str, size: str | None, sets: list[str] | None, parts: list[Path] | None, device: str) -> Any:
    """Return the model of a run folder, or of a recipe with its initial weights."""
    is_recipe = name.endswith(".toml") or name in recipes.names()
    is_run = Path(name).is_dir() and not is_recipe
    if not is_run and not is_recipe and "/" in name:
        raise UserError(f"there is neither a run nor a recipe '{short(name)}'")
    if is_run and (size or sets):
        raise UserError("a run folder has its size already: --size and --set are for recipes")
    if not is_run:
        recipes.read(name)  # report a typo before torch is imported
    from regard import build
    from regard.runs.folder import check_device, read_run

    check_device(device)
    if is_run:
        return read_run(Path(name), device).model
    with errors_about(name):
        return build(load_recipe(name, size, sets, parts, VOCAB, False)).to(device)


def _print_ops(title: str, ops: dict[str, list[dict[str, Any]] | None]) -> None:
    console = Console(highlight=False)
    for phase, rows in ops.items():
        console.print(Text(printable(f"\n{phase}: {title}"), style="bold"))
        if rows is None:
            console.print("  This model takes whole inputs, and does not decode step by step.")
            continue
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for column in ("  op", "calls", "runs on", "why"):
            table.add_column(column, justify="right" if column == "calls" else "left", no_wrap=column != "why")
        before = ""
        for row in rows:
            op = "" if row["op"] == before else row["op"]
            style = "green" if row["runs_on"] == "regard" else ""
            table.add_row(f"  {op}", str(row["calls"]), Text(row["runs_on"], style=style), Text(printable(row["why"])))
            before = row["op"]
        console.print(table)
    console.print()
    console.print(
        Text("Matrix products are those inside other ops and their gradients. What is not listed runs on torch."),
        style="dim",
    )
