"""Latency: each sentence is translated by a separate call, compared with CTranslate2 with the same weights.

    python bench/latency.py --run runs/multi30k --write          five minutes on two cores

The run is that of bench/multi30k.py; where there is none, a quick one is trained for twelve minutes first. Greedy
search and a beam of 4, every contender with one thread and with all; contenders take turns.
Needs: pip install -c constraints.txt -e .[bench]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch

import multi30k
import results
from race import Contender, race, speeds
from regard.export import export
from translate import bleu, sources


def milliseconds(one: Contender) -> float:
    """Return the median time of a sentence over the rounds, in milliseconds."""
    return 1000 / statistics.median(speeds(one, "sentences"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, default=Path("runs/multi30k"))
    parser.add_argument("--count", type=int, default=150, help="sentences")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="put the result into bench/RESULTS.md")
    given = parser.parse_args()
    cores = torch.get_num_threads()
    multi30k.quick(given.run, cores)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sources.json"
        file.write_text(json.dumps(sources(given.run, given.count)))
        export(given.run, Path(folder) / "ct2", "ctranslate2")
        for beam in (1, 4):
            made = [
                Contender(
                    f"{name}, threads: {threads}", "translate.py", which, where, str(file), str(beam), str(threads),
                    "one", threads=threads,
                )
                for name, which, where in (
                    ("regard", "ours", str(given.run)), ("CTranslate2", "ctranslate2", str(Path(folder) / "ct2")),
                )
                for threads in sorted({1, cores})
            ]  # fmt: skip
            race(made, given.rounds)
            best = min(milliseconds(one) for one in made if one.name.startswith("CTranslate2"))
            for one in made:
                score = bleu(one.ask("answers")["answers"], given.count)
                took = milliseconds(one)
                rows.append([str(beam), one.name, f"{took:.2f}", f"{took / best:.2f}", f"{score:.2f}"])
                one.end()
    head = ["beam", "", "ms for a sentence", "times CTranslate2's best", "BLEU"]
    lines = [
        f"- {results.conditions(cores)}",
        f"- Multi30k test 2016, {given.count} sentences, one at a time, {given.rounds} rounds in turn; medians.",
        "",
        *results.table(head, rows),
    ]
    if given.write:
        results.write("Latency of one sentence", lines)


if __name__ == "__main__":
    main()
