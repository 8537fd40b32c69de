"""Race contenders: each runs in its own process and they take turns, so that noise on the machine affects all alike.

A contender reads lines from its input and answers each with a line of JSON: see peers/worker.py.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import results

PEERS = Path(__file__).parent / "peers"
ENVIRONMENTS = Path(__file__).parents[1] / ".venv" / "peers"  # of those that do not live with ours


def environment(name: str, *packages: str) -> Path:
    """Return the Python of a peer's own environment, which is made on first use, or when its packages change."""
    python = ENVIRONMENTS / name / "bin" / "python"
    ready = ENVIRONMENTS / name / "ready"
    if not ready.exists() or ready.read_text() != " ".join(packages):
        results.console.print(f"setting up {name}")
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENTS / name)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
        ready.write_text(" ".join(packages))
    return python


class Contender:
    """A contender. name: in the table; script: a file in peers, with its arguments."""

    def __init__(self, name: str, script: str, *given: str, python: Path | str = sys.executable, threads: int = 0):
        self.name = name
        variables = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
        self.process = subprocess.Popen(
            [str(python), str(PEERS / script), *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=variables,
        )  # fmt: skip
        self.rounds: list[dict[str, Any]] = []

    def ask(self, *words: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(" ".join(words) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            sys.exit(f"{self.name} ended with code {self.process.wait()} when it was asked to {' '.join(words)}")
        return json.loads(line)

    def end(self) -> dict[str, Any]:
        told = self.ask("end")
        self.process.wait()
        return told


def race(contenders: Sequence[Contender], rounds: int, *words: str) -> None:
    """Run all in turn, so many times; the first round is a warm-up and does not count."""
    for number in range(rounds + 1):
        for one in contenders:
            told = one.ask("go", *words)
            if number:
                one.rounds.append(told)
        results.console.print(f"[dim]round {number} of {rounds}[/]")


def speeds(one: Contender, what: str) -> list[float]:
    return [told[what] / told["seconds"] for told in one.rounds]


def ratios(ours: Contender, other: Contender, what: str) -> str:
    """Return the speed ratio: the median over the rounds, the lowest and the highest."""
    found = [a / b for a, b in zip(speeds(ours, what), speeds(other, what), strict=True)]
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
