"""The catalog: list the systems, show one, and verify it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.errors import UserError, printable, short
from regard.files import recipe as recipes
from regard.look.amount import format_count

from .app import AsJson, Parts, Sets, Size, add_parts, app, dump

COUNTS = recipes.FOLDER / "parameters.json"  # parameters of every size, written by `regard systems --count`
VOCAB = 10_000  # where neither the recipe nor the user gives one
SMALL_VOCAB = 61  # enough for the laws


@app.command()
def systems(
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As a page: what docs/systems.md holds.")] = False,
    count: Annotated[bool, typer.Option("--count", hidden=True, help="What recipes/parameters.json holds.")] = False,
) -> None:
    """List all systems: year, idea, sizes and parameters."""
    if markdown:
        return typer.echo(page(), nl=False)
    if count:
        return dump({name: count_parameters(name) for name in recipes.names()})
    counts = json.loads(COUNTS.read_text(encoding="utf-8"))
    rows = [
        {key: recipes.read(name).get(key) for key in ("title", "year", "paper", "idea")}
        | {"name": name, "sizes": counts[name]}
        for name in recipes.names()
    ]
    if as_json:
        return dump(rows)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", row_styles=["", "dim"])
    table.add_column("system", no_wrap=True, style="bold")
    table.add_column("year", no_wrap=True)
    table.add_column("idea", ratio=1)
    table.add_column("size", no_wrap=True)
    table.add_column("parameters", no_wrap=True, justify="right")
    for row in rows:
        names, counts = "\n".join(row["sizes"]), "\n".join(format_count(n) for n in row["sizes"].values())
        table.add_row(row["name"], str(row["year"] or ""), row["idea"], names, counts)
    console = Console()
    console.print(table)
    console.print(f"* the default. Parameters are for a vocabulary of {VOCAB:,} unless a recipe has its own.")
    console.print("regard show NAME draws one, with its costs and its paper.")


def page() -> str:
    """Return docs/systems.md: all systems, the oldest first."""
    known = sorted((recipes.read(name) | {"name": name} for name in recipes.names()), key=lambda one: one["year"])
    rows = [f"| `{one['name']}` | {one['year']} | {one['idea']} | {one['paper']} |" for one in known]
    head = ["# Systems", "", "Written by `regard systems --markdown`.", "", "| recipe | year | what it is | paper |"]
    return "\n".join([*head, "|---|---|---|---|", *rows]) + "\n"


def count_parameters(name: str) -> dict[str, int]:
    """Return the number of parameters of each size of a recipe; the default has a star."""
    from regard.look.sketch import parameters_of_recipe

    written = recipes.read(name)
    known: list[tuple[dict, int]] = []  # so that a size that changes nothing is not built again
    counts: dict[str, int] = {}
    for size in [None, *written.get("size", {})]:
        recipe = recipes.choose(written, size)
        recipe.setdefault("vocab", VOCAB)
        count = next((number for one, number in known if one == recipe), None)
        if count is None:
            count = parameters_of_recipe(recipe)
            known.append((recipe, count))
        counts[size or "default"] = count
    same = [size for size, count in counts.items() if size != "default" and count == counts["default"]]
    if same:  # show the default under its size's name
        counts = {f"{size} *" if size == same[0] else size: n for size, n in counts.items() if size != "default"}
    return counts


@app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME|FILE.toml|RUN", help="A built-in recipe, your own file, or a run folder."),
    ],
    size: Size = None,
    sets: Sets = None,
    vocab: Annotated[str | None, typer.Option(metavar="N", help="Vocabulary: a number, or source,target.")] = None,
    parts: Parts = None,
    as_json: AsJson = False,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw it into this file.")] = None,
) -> None:
    """Show a recipe: layers, shapes, parameters, costs, growth, patterns. For a run folder, also its data, settings,
    metrics and sessions."""
    own = name.endswith(".toml") or name in recipes.names()
    folder = Path(name) if Path(name).is_dir() and not own else None
    if folder is None and os.sep in name and not (own or Path(name).exists()):
        raise UserError(f"there is neither a recipe nor a run '{short(name)}'")
    if folder is not None and (size or sets or vocab):
        raise UserError("a run folder has its size already: --size, --set and --vocab are for recipes")
    if folder is None:
        recipes.read(name)  # report a typo before torch is imported
    from regard.look import recipe as picture
    from regard.look import run as runs
    from regard.look.anatomy import describe
    from regard.look.sketch import build_without_weights

    run = None if folder is None else runs.describe(folder)
    source = name if folder is None else str(folder / "recipe.toml")
    recipe = load_recipe(source, size, sets, parts, parse_vocab(vocab) or VOCAB, vocab is not None)
    with errors_about(source):
        described = describe(build_without_weights(recipe))
    if png is not None:
        picture.png(described, png)
    if as_json:
        return dump(asdict(described) if run is None else run | {"model": asdict(described)})
    console = Console()
    if run is not None:
        console.print(Text(printable(runs.text(run, min(console.width, 100)))), end="\n\n")
    console.print(Text(printable(picture.text(described, min(console.width, 100)))))
    if png is not None:
        console.print(Text(f"drawn in {png}"))


@app.command()
def verify(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE.toml|PART.py", help="A recipe, or a part of your own.")],
    size: Annotated[str | None, typer.Option("--size", help="One of its sizes; tiny where there is one.")] = None,
    sets: Sets = None,
    parts: Parts = None,
    seed: Annotated[int, typer.Option(help="Random seed of the weights and of the test inputs.")] = 0,
    golden: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Golden files of originals; else REGARD_GOLDEN, or a checkout's."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Run the laws on this machine, and compare with the original implementation where its outputs are recorded."""
    if not name.endswith(".py"):
        recipes.read(name)  # report a typo before torch is imported
    from regard.verify import report
    from regard.verify.golden import use_folder

    if name.endswith(".py"):
        add_parts(parts)
        return _print_findings(f"the part in {name}", report.verify_file(name, seed), as_json)
    if size is None and "tiny" in recipes.sizes(name):
        size = "tiny"
    recipe = load_recipe(name, size, sets, parts, SMALL_VOCAB, False)
    with use_folder(golden), errors_about(name):
        return _print_findings(name + (f", size {size}" if size else ""), report.verify_recipe(recipe, seed), as_json)


def _print_findings(what: str, sections: Iterator[Any], as_json: bool) -> int:
    """Print findings as they are made. Return 0 when all laws hold, else 1."""
    console = Console(quiet=as_json)
    reported, broken, worst = [], [], 0.0
    for section in sections:
        console.print(Text(printable("\n".join([what] * (not reported) + ["", section.title])), style="bold"))
        if section.note:
            console.print(Text(printable(f"  – {section.note}")))
        found = []
        for finding in section.findings:
            console.print(_finding_row(finding))
            found.append(finding._asdict() | {"holds": finding.holds, "worst": _finite(finding.worst)})
            broken += [] if finding.holds else [f"{finding.law} ({section.title})"]
            worst = max(worst, finding.worst)
        reported.append({"title": section.title, "note": section.note, "findings": found})
    if as_json:
        dump({"what": what, "holds": not broken, "sections": reported})
    count = sum(len(section["findings"]) for section in reported)
    held = f"all {count} hold; the largest difference seen is {worst:.1e}"
    end = f"\n{len(broken)} of {count} broken: {', '.join(broken)}" if broken else f"\n{held}"
    console.print(Text(printable(end), style="bold"))
    return 1 if broken else 0


def _finding_row(finding: Any) -> Table:
    sign = Text("✓", style="green") if finding.holds else Text("✗", style="red")
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_column(width=3, justify="right")
    line.add_column(min_width=9, no_wrap=True)
    line.add_column(width=7, justify="right")
    line.add_column()
    line.add_row(
        sign,
        finding.law,
        f"{finding.worst:.1e}" if finding.worst else "0",
        Text(printable(finding.detail), style="dim"),
    )
    return line


def _finite(number: float) -> float | None:
    return number if number < float("inf") else None


def load_recipe(
    name: str, size: str | None, sets: list[str] | None, parts: list[Path] | None, vocab: int | list[int], given: bool
) -> recipes.Recipe:
    """Return the recipe with its size and overrides. given: the user gave `vocab`; else it is only a default."""
    add_parts(parts)
    recipe = recipes.load(name, size, sets or ())
    recipe["vocab"] = vocab if given else recipe.get("vocab", vocab)
    return recipe


def parse_vocab(text: str | None) -> int | list[int] | None:
    if text is None:
        return None
    numbers = text.replace("_", "").split(",")
    if len(numbers) > 2 or not all(number.strip().isdecimal() for number in numbers):
        raise UserError(f"--vocab takes a number, or two with a comma: source,target; not '{text}'")
    return int(numbers[0]) if len(numbers) == 1 else [int(number) for number in numbers]


@contextmanager
def errors_about(name: str) -> Iterator[None]:
    """Let errors raised inside the `with` block name the recipe."""
    try:
        yield
    except UserError as error:
        raise error.of(recipes.display_name(name)) from error.__cause__
