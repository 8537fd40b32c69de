"""Graph attention on Cora: GAT and GATv2 by their recipes over many seeds, compared with the published figures.

    python bench/cora.py --write          about ten minutes on one core; resumes after an interruption

Data: ../shared/data/planetoid-cora, the split of Yang et al. 2016: 140 training, 500 dev and 1,000 test nodes. The
model with the lowest loss on the dev nodes is tested.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import results
import runs

PUBLISHED = {"gat": "83.0 ± 0.7 (Veličković et al. 2018)", "gatv2": "—"}


def one(recipe: str, seed: int, folder: Path, threads: int) -> tuple[float, float]:
    """Return test accuracy and minutes."""
    run = folder / f"{recipe}-{seed}"
    if not (run / "model.safetensors").exists():
        data = str(results.data("planetoid-cora"))
        runs.train(run, recipe, "--data", data, "--seed", str(seed), "--threads", str(threads))
    return runs.evaluate(run)["scores"]["accuracy"], runs.minutes(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/cora"))
    parser.add_argument("--recipes", nargs="+", default=["gat", "gatv2"])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="put the result into bench/RESULTS.md")
    given = parser.parse_args()
    rows = []
    for recipe in given.recipes:
        found = [one(recipe, seed, given.runs, given.threads) for seed in range(1, given.seeds + 1)]
        right, minutes = ([pair[i] for pair in found] for i in (0, 1))
        spread = statistics.stdev(right) if len(right) > 1 else 0.0
        rows.append([
            recipe, f"{statistics.mean(right):.2f} ± {spread:.2f}", f"{min(right):.1f} to {max(right):.1f}",
            PUBLISHED.get(recipe, "—"), str(len(right)), f"{60 * statistics.mean(minutes):.0f} s",
        ])  # fmt: skip
    head = ["recipe", "test accuracy, %", "range", "published", "seeds", "time of a run"]
    lines = [*results.table(head, rows), "", results.conditions(given.threads)]
    if given.write:
        results.write("Graph attention on Cora", lines)


if __name__ == "__main__":
    main()
