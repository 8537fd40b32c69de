"""`regard settings`: list every key of a recipe's [model], [train] and [decode], from the constructors' docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from .app import AsJson, app, dump

ENTRY = re.compile(r" *((?:\w+, )*\w+): +(.*)")
UNDOCUMENTED = {  # keys that no constructor's docstring explains
    "model.width": "channels of the vectors between layers, inherited by all parts",
    "model.heads": "heads of every attention, inherited by all mixers",
    "model.depth": "number of layers",
    "model.embed": "the part that turns tokens (or patches, frames, nodes) into vectors",
    "model.head": "the part that turns vectors into answers",
}
INTRODUCTION = """# Settings

Written by `regard settings --markdown`.

A key is set in a recipe file (`[train]`, then `lr = 0.001`), on the command line (`--set train.lr=0.001`) or, the
common ones, by a flag of `regard train` (`--lr 0.001`). Keys of parts inside a model, such as
`model.layer.0.mixer.heads`, are the arguments of those parts."""
NO_DEFAULT = ("required", "from the data")  # instead of a default
SECTIONS = {"model": "what is built", "train": "how it learns", "decode": "how it answers"}


class Setting(NamedTuple):
    key: str
    type: str
    default: str
    meaning: str


@app.command()
def settings(
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As a page: what docs/settings.md holds.")] = False,
) -> None:
    """List every model.*, train.* and decode.* key with its type, default and meaning."""
    found = list(every_setting())
    if as_json:
        return dump([one._asdict() for one in found])
    if markdown:
        return typer.echo(page(found), nl=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("key", no_wrap=True, style="bold")
    table.add_column("default", no_wrap=True)
    table.add_column("meaning", ratio=1)
    for one in found:
        table.add_row(one.key, one.default, one.meaning)
    Console().print(table)


def every_setting() -> Iterator[Setting]:
    """Yield all settings, in the order of the constructors."""
    from regard.core import Model, Stack
    from regard.decode import DecodeConfig
    from regard.runs.settings import Settings

    for section, kinds in (("model", (Model, Stack)), ("train", (Settings,)), ("decode", (DecodeConfig,))):
        arguments = inspect.signature(kinds[0]).parameters
        docs = {name: text for kind in reversed(kinds) for name, text in argument_docs(kind, set(arguments)).items()}
        for name, argument in arguments.items():
            key, kind = f"{section}.{name}", str(argument.annotation).replace(" | ", " or ")
            default = repr(argument.default)
            if argument.default is argument.empty:
                default = "from the data" if name == "vocab" else "required"
            yield Setting(key, kind, default, docs.get(name) or UNDOCUMENTED[key])


def argument_docs(kind: type, names: set[str]) -> dict[str, str]:
    """Return what a docstring says about each of these arguments, as in 'lr: ...' or 'steps, epochs: ...'."""
    found: dict[str, str] = {}
    now: list[str] = []
    for line in (inspect.getdoc(kind) or "").splitlines():
        entry = ENTRY.fullmatch(line)
        begun = entry[1].split(", ") if entry else []
        if entry and names.issuperset(begun):
            now = begun
            found |= dict.fromkeys(now, entry[2])
        elif not line.strip() or (entry and not line.startswith(" ")):
            now = []
        else:
            found |= {name: f"{found[name]} {line.strip()}" for name in now}
    return found


def page(found: list[Setting]) -> str:
    """Return docs/settings.md."""
    lines = [INTRODUCTION]
    for section, what in SECTIONS.items():
        lines += ["", f"## {section}: {what}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for one in found:
            if one.key.startswith(f"{section}."):
                default = one.default if one.default in NO_DEFAULT else f"`{one.default}`"
                lines.append(f"| `{one.key}` | {one.type} | {default} | {one.meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"
