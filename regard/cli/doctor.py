"""`regard doctor`: report what this machine has, and what would make regard faster."""

from __future__ import annotations

import typer

from .app import AsJson, app, dump


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Report what this machine has: cores, instruction sets, compiler, kernels, torch, memory; and what would help."""
    from regard.doctor import examine
    from regard.memory import format_bytes

    found = examine()
    if as_json:
        return dump(found)
    found["machine"]["memory"] = format_bytes(found["machine"]["memory"])
    advice = found.pop("advice")
    for section, facts in found.items():
        typer.secho(section, bold=True)
        for name, fact in facts.items():
            if isinstance(fact, bool):
                fact = "yes" if fact else "no"
            text = ", ".join(fact) if isinstance(fact, list) else str(fact)
            if text:
                typer.echo(f"  {name:<17} {text}")
    typer.secho("advice", bold=True)
    for sentence in advice or ["Nothing: everything that regard can use is used."]:
        typer.echo(f"  {sentence}")
