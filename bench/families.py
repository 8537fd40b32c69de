"""Five pretraining objectives on plain text, each trained from scratch for the same few minutes, and Transformer-XL
evaluated with a longer memory than it was trained with.

    python bench/families.py --minutes 4 --write

Data: ../shared/data/tinyshakespeare, BPE. The losses are of different targets (the next token, masked tokens, masked
spans, tokens in any order), so the curves cannot be compared with each other.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure

import results
import runs
import shakespeare

PICTURE = Path(__file__).parents[1] / "docs" / "families.png"
ASKED = {
    "gpt2": "the next token",
    "bert": "hidden tokens",
    "t5": "hidden spans",
    "xlnet": "tokens in any order",
    "transformer-xl": "the next token, with memory",
}
COMMON = (
    "train.optimizer=adamw",
    "train.schedule=cosine",
    "train.lr=0.001",
    "train.warmup=100",
    "train.batch_tokens=2048",
)
MEMORY = 64  # of Transformer-XL in training, as its tiny size has it, and so long are its segments


def train(name: str, run: Path, minutes: float, threads: int, texts: tuple[Path, Path]) -> None:
    changes = [*COMMON, *(() if name == "transformer-xl" else ("train.context_length=128",))]
    runs.train(
        run, name, "--size", "tiny", "--data", str(texts[0]), "--dev", str(texts[1]), "--tokenizer", "bpe", "--vocab",
        "2000", "--minutes", str(minutes), "--seed", "1", "--threads", str(threads),
        *(word for change in changes for word in ("--set", change)),
    )  # fmt: skip


def memories(run: Path, dev: Path) -> list[list[str]]:
    """Return Transformer-XL's loss on the dev text for several memory lengths."""
    rows = []
    for memory in (0, MEMORY, 2 * MEMORY, 4 * MEMORY):
        told = runs.evaluate(run, "--data", str(dev), "--metric", "loss", "--memory", str(memory))
        rows.append([str(memory), f"{told['scores']['loss']:.4f}"])
    return rows


def draw(curves: dict[str, list[tuple[float, float]]]) -> None:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot(xlabel="minutes", ylabel="loss per token asked for, dev")
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=f"{name}: {ASKED[name]}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(PICTURE, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/families"))
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--only", default=",".join(ASKED), help="some of them")
    parser.add_argument("--write", action="store_true", help="put the result into bench/RESULTS.md")
    given = parser.parse_args()
    texts = shakespeare.parts(given.runs / "data")
    rows, curves = [], {}
    for name in given.only.split(","):
        run = given.runs / name
        train(name, run, given.minutes, given.threads, texts)
        points = curves[name] = runs.curve(run, "loss")
        parameters = json.loads((run / "run.json").read_text())["parameters"]
        shown = ", ".join(f"{value:.2f}" for _, value in runs.some(points, 6))
        rows.append([name, ASKED[name], f"{parameters / 1e6:.2f} M", f"{runs.steps(run):,}", shown])
    text = [
        f"- {results.conditions(given.threads)}",
        f"- {given.minutes:g} minutes each, seed 1, size tiny, 2,000 pieces, sequences of 128 (Transformer-XL: 64, and "
        "a memory of 64).",
        "",
        *results.table(["recipe", "asked for", "parameters", "steps", "loss on dev, as it fell"], rows),
    ]
    if "transformer-xl" in curves:
        found = memories(given.runs / "transformer-xl", texts[1])
        text += ["", f"Transformer-XL, trained with a memory of {MEMORY}, read with others:", ""]
        text += results.table(["memory", "loss on dev"], found)
    if given.write:
        draw(curves)
        results.write("Families: five objectives from scratch", [*text, "", "![losses](../docs/families.png)"])


if __name__ == "__main__":
    main()
