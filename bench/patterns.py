"""Sparse attention: patterns on the `blocks` kernel, forward and backward, compared with torch's dense causal kernel
and the reference kernel in one run: time, peak memory, and how both grow with the length.

    python bench/patterns.py                 prints the tables
    python bench/patterns.py --write         and puts them into bench/RESULTS.md

Contenders take turns, and the median counts, so that a busy moment affects all alike. Memory is the peak of a new
process beyond what it held before: inputs, outputs and gradients included. Needs Linux.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

import results
from regard.bases import Attend, AttentionMask, blocks, layout
from regard.core import Pattern, Position, Score

WINDOW = "causal & window(256)"
CONTENDERS = {  # kernel, pattern
    "blocks, window": ("blocks", WINDOW),
    "blocks, BigBird": ("blocks", "causal & (window(256) | first(64) | random_blocks(3))"),
    "dense SDPA": ("sdpa", "causal"),
    "reference": ("reference", WINDOW),
}
Cell = dict[tuple[str, int], float]  # by contender and length


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--reference-up-to", type=int, default=8192, help="it takes 24 bytes per head and pair")
    parser.add_argument("--write", action="store_true", help="put the tables into bench/RESULTS.md")
    parser.add_argument("--probe", nargs=2, help=argparse.SUPPRESS)  # one contender, one length: peak memory
    return parser.parse_args()


def prepare(name: str, length: int, given: argparse.Namespace) -> Callable[[], None]:
    """Return a function that runs forward and backward of one contender."""
    kernel, pattern = CONTENDERS[name]
    torch.manual_seed(0)
    shape = (given.batch, length, given.heads, given.dim)
    q, k, v = (torch.randn(shape).transpose(1, 2).requires_grad_() for _ in range(3))  # as a mixer hands them over
    attend, at = Attend(kernel), torch.arange(length)[None]
    see = AttentionMask(Pattern.parse(pattern), at, at, from_start=True)

    def run() -> None:
        y = attend(q * given.dim**-0.5, k, v, see, Score(), Position())
        y.backward(torch.ones_like(y))
        q.grad = k.grad = v.grad = None

    return run


def joins(name: str, length: int, given: argparse.Namespace) -> bool:
    return name != "reference" or length <= given.reference_up_to


def measure_time(given: argparse.Namespace, console: Console) -> Cell:
    """Return median seconds."""
    medians: Cell = {}
    for length in given.lengths:
        runs = {name: prepare(name, length, given) for name in CONTENDERS if joins(name, length, given)}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        with console.status(f"time at {length}"):
            for turn in range(given.rounds + 1):
                for name, run in runs.items():
                    if name == "reference" and turn > 2:
                        continue  # it is here for its memory, and slow
                    begin = time.perf_counter()
                    run()
                    if turn:  # the first one warms up and derives the plan
                        seconds[name].append(time.perf_counter() - begin)
        medians |= {(name, length): statistics.median(taken) for name, taken in seconds.items() if taken}
    return medians


def measure_memory(given: argparse.Namespace, console: Console) -> Cell:
    """Return peak megabytes, each measured in a new process."""
    peaks: Cell = {}
    for length in given.lengths:
        for name in CONTENDERS:
            if not joins(name, length, given):
                continue
            same = [f"--{key}={getattr(given, key)}" for key in ("batch", "heads", "dim", "threads")]
            with console.status(f"memory of {name} at {length}"):
                done = subprocess.run(
                    [sys.executable, __file__, "--probe", name, str(length), *same], capture_output=True, text=True
                )
            if done.returncode:
                console.print(f"[red]{name} at {length} failed:[/] {done.stderr.strip()[-300:]}")
                continue
            peaks[name, length] = float(done.stdout)
    return peaks


def probe(name: str, length: int, given: argparse.Namespace) -> float:
    prepare(name, 256, given)()  # what is loaded once
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is held
    before = peak()
    prepare(name, length, given)()
    return peak() - before


def peak() -> float:
    """Return the peak in megabytes. Not that of getrusage, which in a child begins with its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def growth(cells: Cell, name: str) -> float:
    """Return the exponent e of the best fit of n^e."""
    known = sorted((length, value) for (who, length), value in cells.items() if who == name)
    if len(known) < 2:
        return float("nan")
    lengths, values = zip(*known, strict=True)
    return float(np.polyfit(np.log(lengths), np.log(values), 1)[0])


def rows(given: argparse.Namespace, times: Cell, peaks: Cell) -> list[list[str]]:
    """Return a row for each length and contender: time, speed-up over dense, memory, share of the reference's."""
    lines = []
    for length in given.lengths:
        for name in CONTENDERS:
            if (name, length) not in times:
                continue
            taken, peak, most = times[name, length], peaks.get((name, length)), peaks.get(("reference", length))
            lines.append(
                [
                    str(length),
                    name,
                    f"{1000 * taken:,.0f} ms",
                    f"{times['dense SDPA', length] / taken:.1f}",
                    "" if peak is None else f"{peak:,.0f} MB",
                    "" if peak is None or most is None else f"{peak / most:.3f}",
                ]
            )
    return lines


HEAD = ["length", "contender", "time", "times as fast as dense SDPA", "peak memory", "of the reference's"]


def shape(given: argparse.Namespace) -> str:
    sizes = f"batch {given.batch}, {given.heads} heads, dim {given.dim}, float32, forward + backward"
    return f"{sizes}; median of {given.rounds} rounds."


def plan_cost(given: argparse.Namespace) -> str:
    """Return a sentence on the seconds of deriving a pattern's layout, which is done once per length."""
    length, pattern = max(given.lengths), Pattern.parse(CONTENDERS["blocks, BigBird"][1])
    layout._plan.cache_clear()
    begin = time.perf_counter()
    layout.plan(pattern, length, blocks.BLOCK, torch.device("cpu"))
    return f"Deriving the plan of `{pattern}` at {length}, once: {time.perf_counter() - begin:.2f} s."


def main() -> None:
    given = arguments()
    torch.set_num_threads(given.threads)
    if given.probe:
        print(probe(given.probe[0], int(given.probe[1]), given))
        return
    console = results.console
    times, peaks = measure_time(given, console), measure_memory(given, console)
    lines = rows(given, times, peaks)
    grown = [[name, f"n^{growth(times, name):.2f}", f"n^{growth(peaks, name):.2f}"] for name in CONTENDERS]
    patterns = [f"{name}: kernel `{kernel}`, pattern `{pattern}`." for name, (kernel, pattern) in CONTENDERS.items()]
    notes = [results.conditions(), shape(given), *patterns, plan_cost(given)]
    text = [f"- {note}" for note in notes] + ["", *results.table(HEAD, lines), ""]
    text += results.table(["contender", "time grows as", "memory grows as"], grown)
    if given.write:
        results.write("Patterns: linear where it should be", text)


if __name__ == "__main__":
    main()
