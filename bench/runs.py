"""Training runs of a benchmark, by the command that users type; an interrupted run is resumed."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import results

REGARD = [sys.executable, "-m", "regard"]


def train(run: Path, *asked: str, automatic: bool = False) -> None:
    """Run `regard train ...`, shown on the terminal. automatic: let it choose settings that are not given, as for
    users."""
    asked = asked if automatic else (*asked, "--as-published")
    known = (run / "run.json").exists()
    command = ["train", "--resume", str(run)] if known else ["train", *asked, "--out", str(run)]
    results.console.print(f"[dim]regard {' '.join(command)}[/]")
    done = subprocess.run([*REGARD, *command])
    if done.returncode:
        sys.exit(done.returncode)


def evaluate(run: Path, *asked: str) -> dict[str, Any]:
    """Return the output of `regard evaluate ... --json`."""
    done = subprocess.run([*REGARD, "evaluate", str(run), *asked, "--json"], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def curve(run: Path, metric: str) -> list[tuple[float, float]]:
    """Return minutes and the metric of every evaluation on the dev set."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["seconds"] / 60, line["dev"][metric]) for line in lines if "dev" in line]


def minutes(run: Path) -> float:
    """Return the minutes of the whole run, evaluations included."""
    last = (run / "metrics.jsonl").read_text().splitlines()[-1]
    return json.loads(last)["seconds"] / 60


def steps(run: Path) -> int:
    last = (run / "metrics.jsonl").read_text().splitlines()[-1]
    return json.loads(last)["step"]


def some(points: list[tuple[float, float]], count: int = 10) -> list[tuple[float, float]]:
    """Return about so many items, evenly spaced, with the last one."""
    every = -(-len(points) // count)
    return points[::-1][::every][::-1]


def lines_of(path: Path) -> list[str]:
    """Return the lines of a gzipped text."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return file.read().splitlines()
