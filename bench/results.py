"""What all benchmarks share: tables on the terminal, sections of bench/RESULTS.md, and the description of the
machine."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "RESULTS.md"
SHARED = Path(__file__).parents[2] / "shared" / "data"
console = Console()


def data(name: str) -> Path:
    """Return the path of a data set beside the project; exit without it."""
    path = SHARED / name
    if not path.exists():
        sys.exit(f"this bench needs the data set {name} in {SHARED}, which is not here")
    return path


def conditions(threads: int | None = None) -> str:
    """Return the command, the machine and the date."""
    told = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    cpu = next((line.partition(":")[2].strip() for line in told if line.startswith("model name")), platform.processor())
    command = " ".join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    threads = threads or torch.get_num_threads()
    return f"`{command}`; {os.cpu_count()} cores ({cpu}), {threads} threads, torch {torch.__version__}, {date.today()}."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table as lines of Markdown, and print it."""
    shown = Table(*head)
    for row in rows:
        shown.add_row(*row)
    console.print(shown)
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def write(title: str, lines: Sequence[str]) -> None:
    """Replace the section of the same title, or append one."""
    old = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else "# Results\n"
    section = "\n".join([title, "", *lines]).strip() + "\n"
    parts = ("\n" + old).split("\n## ")
    at = next((i for i, part in enumerate(parts) if part.startswith(title + "\n")), len(parts))
    parts[at : at + 1] = [section]
    text = "\n## ".join(part.strip() + "\n" for part in parts).strip() + "\n"
    new = RESULTS.with_suffix(".part")
    new.write_text(text, encoding="utf-8")
    new.replace(RESULTS)
    console.print(f"written to {RESULTS}: {title}")
