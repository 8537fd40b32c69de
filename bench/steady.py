"""Steadiness of decoding: speed and memory over an hour, and how the time grows with the number of sentences.

    python bench/steady.py --run runs/multi30k --write          an hour on two cores

The run is that of bench/multi30k.py; where there is none, a quick one is trained for twelve minutes first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

import multi30k
import results
import runs
from regard import load
from regard.decode import DecodeConfig
from regard.machine import tune
from regard.tasks.run import Run

COUNTS = (500, 1000, 2000, 4000, 8000)


def resident() -> float:
    """Return the resident memory in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def growth(run: Run, config: DecodeConfig, texts: list[str]) -> list[list[str]]:
    """Return the seconds for more and more sentences, which are the test set repeated."""
    rows = []
    for count in COUNTS:
        many = [texts[i % len(texts)] for i in range(count)]
        begun = time.perf_counter()
        for _ in run.answers(many, config):
            pass
        seconds = time.perf_counter() - begun
        rows.append([f"{count:,}", f"{seconds:.1f}", f"{1000 * seconds / count:.2f}"])
    return rows


def hour(run: Run, config: DecodeConfig, texts: list[str], minutes: float) -> list[tuple[float, float, float]]:
    """Return minutes, sentences per second and MiB after every pass over the texts."""
    begun, seen = time.perf_counter(), []
    while not seen or seen[-1][0] < minutes:
        before = time.perf_counter()
        answers = run.predict(texts, config)
        now = time.perf_counter()
        seen.append(((now - begun) / 60, len(answers) / (now - before), resident()))
        if len(seen) % 20 == 0:
            results.console.print("{:5.1f} minutes  {:6.1f} sentences/s  {:6.0f} MiB".format(*seen[-1]))
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, default=Path("runs/multi30k"))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="put the result into bench/RESULTS.md")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    multi30k.quick(given.run, given.threads)
    texts = runs.lines_of(multi30k.pieces() / "test.2016.en.gz")
    run, config = load(given.run), DecodeConfig(beam=given.beam)
    run.predict(texts, config)
    grown = growth(run, config, texts)
    seen = hour(run, config, texts, given.minutes)
    rows = []
    for part in range(6):
        some = [one for one in seen if part <= 6 * one[0] / seen[-1][0] < part + 1 + (part == 5)]
        if not some:
            continue  # it was over soon
        rows.append(
            [f"{some[0][0]:.0f} to {some[-1][0]:.0f}", f"{statistics.median(one[1] for one in some):.0f}",
             f"{min(one[2] for one in some):,.0f} to {max(one[2] for one in some):,.0f}"]
        )  # fmt: skip
    lines = [
        f"- {results.conditions(given.threads)}",
        f"- Multi30k test 2016, repeated, {len(seen) * len(texts):,} sentences in all, beam {given.beam}.",
        "",
        *results.table(["minutes", "sentences/s, median", "resident MiB"], rows),
        "",
        *results.table(["sentences at once", "seconds", "ms per sentence"], grown),
    ]
    if given.write:
        results.write("An hour of decoding", lines)


if __name__ == "__main__":
    tune()
    main()
