"""Time to quality: minutes of training until BLEU 35 on Multi30k, English to German, compared with Hugging Face's
Marian in a plain loop.

    python bench/quality.py --write          two hours on two cores

Both begin with the same weights and see the same batches in the same order, with the same settings; only the random
numbers of dropout differ. They take turns of some steps, after which the dev set is translated greedily by the same
code for both, off the clock.
Needs: pip install -c constraints.txt -e .[bench]
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import sacrebleu
import torch

import results
from race import Contender
from regard import restore
from regard.convert import convert
from regard.core import Model
from regard.data.batches import pad_rows
from regard.decode import Request, greedy
from regard.machine import tune
from regard.metrics import join_subwords
from train import coded, hugging, numbers, pairs, sentences

SETTINGS = {
    "optimizer": "muon",
    "lr": 0.004,
    "warmup": 100,
    "steps": 1400,
    "label_smoothing": 0.1,
    "max_grad_norm": 25.0,
}
BATCH = 4096
DROPOUT = 0.2
START, END, PAD = 1, 2, 0


class Point(NamedTuple):
    minutes: float  # of training
    steps: int
    bleu: float


class Dev:
    """The dev set, and the BLEU of a model on it."""

    def __init__(self, count: int):
        number = numbers()
        self.names = {i: piece for piece, i in number.items()}
        self.sources = coded(sentences("valid", "en")[:count], number)
        self.references = [join_subwords(" ".join(line)) for line in sentences("valid", "de")[:count]]

    def bleu(self, model: Model) -> float:
        source, valid = pad_rows(self.sources, PAD)
        with torch.no_grad():
            memory = model.eval().encode(source, valid)
        found = greedy(model, Request.after(START, END, memory, 60))
        answers = [join_subwords(" ".join(self.names.get(token, "?") for token in one.tokens)) for one in found]
        return sacrebleu.corpus_bleu(answers, [self.references], tokenize="none", force=True).score


def model_of(one: Contender, folder: Path) -> Model:
    kept = folder / "kept"
    shutil.rmtree(kept, ignore_errors=True)
    one.ask("keep", str(kept))
    if one.name == "regard":
        return restore(kept)
    shutil.rmtree(folder / "converted", ignore_errors=True)
    convert(kept, folder / "converted")
    return restore(folder / "converted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bleu", type=float, default=35.0)
    parser.add_argument("--turn", type=int, default=100, help="steps of each, after which the dev set is translated")
    parser.add_argument("--count", type=int, default=500, help="dev sentences")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="put the result into bench/RESULTS.md")
    given = parser.parse_args()
    dev = Dev(given.count)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        batches = folder / "pairs.json"
        batches.write_text(json.dumps(pairs(BATCH, None) | SETTINGS))
        hugging("pairs", folder / "hf", DROPOUT)
        convert(folder / "hf", folder / "run")
        made = [
            Contender("regard", "ours.py", str(folder / "run"), str(batches), "pairs", threads=given.threads),
            Contender("Hugging Face", "hugging.py", str(folder / "hf"), str(batches), "pairs", threads=given.threads),
        ]
        curves = {one.name: [Point(0.0, 0, 0.0)] for one in made}
        going = list(made)
        while going:
            for one in list(going):
                last, taken = curves[one.name][-1], one.ask("go", str(given.turn))["seconds"] / 60
                now = Point(last.minutes + taken, last.steps + given.turn, dev.bleu(model_of(one, folder)))
                curves[one.name].append(now)
                results.console.print(
                    f"{one.name:14} step {now.steps:5}  {now.minutes:6.1f} minutes  BLEU {now.bleu:5.2f}"
                )
                if now.bleu >= given.bleu or now.steps >= SETTINGS["steps"]:
                    going.remove(one)
        for one in made:
            one.end()
    ends = {name: points[-1] for name, points in curves.items()}
    rows = [
        [name, f"{'' if end.bleu >= given.bleu else 'not in '}{end.minutes:.1f}", f"{end.steps:,}", f"{end.bleu:.2f}",
         f"{end.minutes / ends['regard'].minutes:.2f}"]
        for name, end in ends.items()
    ]  # fmt: skip
    lines = [
        f"- {results.conditions(given.threads)}",
        f"- Transformer-Tiny (4+4 layers, width 128, dropout {DROPOUT}), batches of {BATCH:,} target tokens, Muon and "
        f"AdamW, learning rate {SETTINGS['lr']} after {SETTINGS['warmup']:,} steps and then down to 0 at "
        f"{SETTINGS['steps']:,}, smoothing {SETTINGS['smoothing']}; {given.count} dev sentences, greedy, every "
        f"{given.turn} steps. Minutes of training alone.",
        "",
        *results.table(["", f"minutes to BLEU {given.bleu:g}", "steps", "BLEU", "times as long"], rows),
        "",
        "![BLEU](../docs/quality.png)",
    ]
    if given.write:
        picture(curves, given.bleu, results.RESULTS.parents[1] / "docs" / "quality.png")
        results.write("Time to quality: BLEU 35 on Multi30k", lines)


def picture(curves: dict[str, list[Point]], wanted: float, path: Path) -> None:
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(6, 3.2), layout="constrained")
    axes = drawn.add_subplot(xlabel="minutes of training", ylabel="BLEU, dev, greedy", title="Multi30k en-de")
    for name, points in curves.items():
        axes.plot([p.minutes for p in points], [p.bleu for p in points], marker="o", markersize=3, label=name)
    axes.axhline(wanted, color="grey", linewidth=0.8)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    drawn.savefig(path, dpi=130)


if __name__ == "__main__":
    tune()
    main()
