"""The program `regard`, the options that its commands share, and how it ends."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from regard import __version__
from regard.errors import UserError, printable
from regard.machine import command_line, leave, tune
from regard.synonyms import RENAMED_FLAGS

SYSTEM = {errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ELOOP}

app = typer.Typer(name="regard", add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)

Size = Annotated[str | None, typer.Option("--size", help="One of the recipe's sizes.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change an entry: model.width=256.")]
Parts = Annotated[list[Path] | None, typer.Option("--parts", metavar="DIR", help="A folder with parts of yours.")]


def _threads(many: int) -> int:
    if many:
        import torch

        torch.set_num_threads(many)
    return many


Threads = Annotated[
    int, typer.Option(min=0, max=1024, callback=_threads, help="CPU threads; 0: as many as torch takes.")
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]


@app.callback(invoke_without_command=True)
def regard(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Every Transformer, one core."""
    if version:
        typer.echo(f"regard {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def add_parts(folders: list[Path] | None) -> None:
    """Let recipes name the parts in these folders."""
    if folders:
        from regard.core import add_folder

        for folder in folders:
            add_folder(folder)


def dump(data: Any, indent: int | None = 2) -> None:
    """Print as JSON. What a terminal must not see stands in strings, and JSON itself writes it as \\u001b."""
    typer.echo(printable(json.dumps(data, indent=indent, ensure_ascii=False)))


def main(arguments: list[str] | None = None) -> int:
    """0 when all is well, 1 when something does not hold, 2 when the user has to mend something, 130 after Ctrl-C."""
    try:
        tune()
        with command_line():
            code = app(arguments, prog_name="regard", standalone_mode=False)
        sys.stdout.flush()
        return _stopped() if code == 130 else code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return _stopped()
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as error:  # typer's own way with such a reader
        if isinstance(error.__context__, BrokenPipeError):
            return 0
        raise
    except Exception as error:
        told = str(error) if isinstance(error, UserError) else _memory(error) or _system(error) or _usage(error)
        if told is None:
            raise
        print(f"regard: {printable(told)}", file=sys.stderr)
        return 2


def _stopped() -> int:
    """After Ctrl-C, which typer makes an exit code of."""
    print("regard: stopped", file=sys.stderr)
    leave(130)
    return 130


def _memory(error: Exception) -> str | None:
    """What to do when a device has no more of it."""
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if not known and "DefaultCPUAllocator" not in str(error):
        return None
    return "there is not enough memory: lower train.batch_tokens or decode.max_batch_tokens, or take a smaller model"


def _system(error: Exception) -> str | None:
    """What the system says about a file, where that is no mistake of the program."""
    if not isinstance(error, OSError) or error.errno not in SYSTEM:
        return None
    name = "" if error.filename is None else f"'{os.fsdecode(error.filename)[:200]}': "
    return f"{name}{error.strerror}"


def _usage(error: Exception) -> str | None:
    """What typer says about a command line that it does not understand."""
    flag = getattr(error, "option_name", "")
    if flag in RENAMED_FLAGS:
        return f"{flag} is called {RENAMED_FLAGS[flag]}"
    tell = getattr(error, "format_message", None)
    return None if tell is None else f"{tell().rstrip('.')} (see regard --help)"
