"""The program `regard`: its entry point, the options that commands share, and its exit codes."""

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

SYSTEM_ERRORS = {errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ELOOP}

app = typer.Typer(name="regard", add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)

Size = Annotated[str | None, typer.Option("--size", help="One of the recipe's sizes.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change an entry: model.width=256.")]
Parts = Annotated[list[Path] | None, typer.Option("--parts", metavar="DIR", help="A folder with your own parts.")]


def _threads(count: int) -> int:
    if count:
        import torch

        torch.set_num_threads(count)
    return count


Threads = Annotated[int, typer.Option(min=0, max=1024, callback=_threads, help="CPU threads; 0: torch's default.")]
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
    """Print as JSON. Control characters in strings are escaped, as in \\u001b."""
    typer.echo(printable(json.dumps(data, indent=indent, ensure_ascii=False)))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 for success, 1 when a check fails, 2 after an error that the
    user can fix, 130 after Ctrl-C."""
    try:
        tune()
        with command_line():
            code = app(arguments, prog_name="regard", standalone_mode=False)
        sys.stdout.flush()
        return _stopped() if code == 130 else code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return _stopped()
    except BrokenPipeError:  # the reader of the pipe has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as error:  # typer turns a broken pipe into an exit
        if isinstance(error.__context__, BrokenPipeError):
            return 0
        raise
    except Exception as error:
        message = (
            str(error)
            if isinstance(error, UserError)
            else _explain_memory_error(error) or _explain_system_error(error) or _explain_usage_error(error)
        )
        if message is None:
            raise
        print(f"regard: {printable(message)}", file=sys.stderr)
        return 2


def _stopped() -> int:
    """Report Ctrl-C and return its exit code."""
    print("regard: stopped", file=sys.stderr)
    leave(130)
    return 130


def _explain_memory_error(error: Exception) -> str | None:
    """Return a message for an out-of-memory error; None: it is another error."""
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if not known and "DefaultCPUAllocator" not in str(error):
        return None
    return "there is not enough memory: lower train.batch_tokens or decode.max_batch_tokens, or take a smaller model"


def _explain_system_error(error: Exception) -> str | None:
    """Return the system's message about a file, for errors that the user can fix; None: it is another error."""
    if not isinstance(error, OSError) or error.errno not in SYSTEM_ERRORS:
        return None
    name = "" if error.filename is None else f"'{os.fsdecode(error.filename)[:200]}': "
    return f"{name}{error.strerror}"


def _explain_usage_error(error: Exception) -> str | None:
    """Return typer's message about a command line that it does not understand; None: it is another error."""
    flag = getattr(error, "option_name", "")
    if flag in RENAMED_FLAGS:
        return f"{flag} is called {RENAMED_FLAGS[flag]}"
    tell = getattr(error, "format_message", None)
    return None if tell is None else f"{tell().rstrip('.')} (see regard --help)"
