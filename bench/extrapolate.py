"""Train short, test long: decoders that differ only in their positions, trained on sequences of 128 characters and
tested on longer ones.

    python bench/extrapolate.py --minutes 10 --write
    python bench/extrapolate.py --only ALiBi,sinusoidal --minutes 3

Data: ../shared/data/tinyshakespeare, the first 90 % for training; the rest is read in adjacent windows of each length,
so that every character is predicted once at every length.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

import regard
import results
import runs
import shakespeare
from regard.evaluate import evaluate
from regard.machine import tune

PICTURE = Path(__file__).parents[1] / "docs" / "extrapolation.png"
TRAINED = 128
LENGTHS = (128, 256, 512, 1024)
BARE = "model.layer.0.mixer.position=none"
SHARED = "model.layer.0.mixer.position=shared"
CONTENDERS: dict[str, tuple[str, ...]] = {  # a recipe and what is changed in it
    "ALiBi": ("alibi",),
    "xPos": ("xpos",),
    "rotary": ("rotary",),
    "T5": ("transformer-decoder", SHARED, "model.position={part='t5', bidirectional=false}"),
    "FLOATER": ("transformer-decoder", SHARED, "model.position=floater", "model.layer.0.mixer.bias=o"),
    "sinusoidal": ("transformer-decoder", BARE, "model.embed={part='tokens', position='sinusoidal'}"),
    "none": ("transformer-decoder", BARE),
}
SETTINGS = {
    "train.context_length": TRAINED,
    "train.batch_size": 32,
    "train.optimizer": "adamw",
    "train.schedule": "cosine",
    "train.lr": 0.002,
    "train.min_lr_ratio": 0.1,
    "train.warmup": 100,
    "train.weight_decay": 0.1,
}


def train(name: str, run: Path, minutes: float, threads: int, texts: tuple[Path, Path]) -> None:
    recipe, *changes = CONTENDERS[name]
    changes += [f"{key}={value}" for key, value in SETTINGS.items()]
    runs.train(
        run, recipe, "--size", "tiny", "--data", str(texts[0]), "--dev", str(texts[1]), "--tokenizer", "characters",
        "--minutes", str(minutes), "--seed", "1", "--threads", str(threads),
        *(word for change in changes for word in ("--set", change)),
    )  # fmt: skip


def test(run: Path, dev: Path) -> list[float]:
    """Return the perplexity at each length, by changing the run's context length."""
    loaded = regard.load(run)
    told: dict[str, Any] = loaded.model.recipe  # type: ignore[assignment]
    found = []
    for length in LENGTHS:
        told["train"]["context"] = length
        found.append(evaluate(loaded, [(dev.read_text(encoding="utf-8"),)])["scores"]["perplexity"])
    return found


def draw(found: dict[str, list[float]]) -> None:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, values in found.items():
        axes.plot(LENGTHS, values, marker="o", label=name)
    axes.axvline(TRAINED, color="grey", linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 3, 4, 6, 8)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
    axes.set_xlabel(f"characters of a sequence (trained on {TRAINED})")
    axes.set_ylabel("perplexity of a character")
    axes.legend()
    figure.savefig(PICTURE, dpi=120)
    results.console.print(f"drawn: {PICTURE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/extrapolate"))
    parser.add_argument("--only", default=",".join(CONTENDERS), help="some of " + ", ".join(CONTENDERS))
    parser.add_argument("--minutes", type=float, default=10, help="of training, for each")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"put the result into bench/RESULTS.md and {PICTURE.name}")
    given = parser.parse_args()
    names = given.only.split(",")
    if unknown := sorted(set(names) - set(CONTENDERS)):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(CONTENDERS)}")
    texts = shakespeare.parts(given.runs / "data")
    found = {}
    for name in names:
        run = given.runs / name.lower()
        train(name, run, given.minutes, given.threads, texts)
        found[name] = test(run, texts[1])
    rows = [
        [
            name,
            f"{runs.steps(given.runs / name.lower()):,}",
            *(f"{p:.2f}" for p in values),
            f"{values[2] / values[0]:.2f}",
        ]
        for name, values in found.items()
    ]
    head = ["positions", "steps", *(f"at {length}" for length in LENGTHS), "512 over 128"]
    text = [
        f"- {results.conditions(given.threads)} Tiny Shakespeare by characters, size tiny, context {TRAINED}, seed 1.",
        "- Perplexity of a character on the last tenth; with longer windows, fewer characters lack a context.",
        "- Adam changes a parameter by about the learning rate per step: T5's biases, initially zero, take longer.",
        "",
        *results.table(head, rows),
        "",
        f"![Perplexity by length](../docs/{PICTURE.name})",
    ]
    if given.write:
        draw(found)
        results.write("Train short, test long", text)


if __name__ == "__main__":
    tune()
    main()
