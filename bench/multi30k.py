"""Transformer-Tiny on Multi30k, English to German, as Wu et al. 2021 (ACL, "Good for Misconceived Reasons") trained it:
tokenized BLEU 41.02 on test 2016.

    python bench/multi30k.py --write        two hours on two cores; resumes after an interruption

Data: ../shared/data/multi30k (lowercased, Moses tokens, 10,000 joint BPE merges). BLEU is given twice: on tokens, as
published, and by sacreBLEU on detokenized text against the raw references, without case.
Needs: pip install -c constraints.txt -e .[bench]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import sacrebleu
import torch
from sacremoses import MosesDetokenizer

import results
import runs
from regard import load
from regard.decode import DecodeConfig
from regard.machine import tune
from regard.metrics import join_subwords

SETTINGS = {  # their two devices with 4,096 tokens each are one batch of twice as many here
    "train.batch_tokens": 8192,
    "train.label_smoothing": 0.1,
    "train.lr": 0.005,
    "train.warmup": 2000,
    "train.max_grad_norm": 25,
    "train.eval_steps": 56,  # an epoch
    "train.average": 10,
    "train.patience": 10,
}
QUICK = {  # a good model soon, for those who measure something else
    "train.batch_tokens": 4096,
    "train.label_smoothing": 0.1,
    "train.optimizer": "muon",
    "train.lr": 0.004,
    "train.schedule": "linear",
    "train.warmup": 100,
    "train.max_grad_norm": 25,
    "train.average": 1,
    "model.dropout": 0.1,
}
PUBLISHED = 41.02


def pieces() -> Path:
    return results.data("multi30k/bpe10k-en-de")


def train(run: Path, threads: int, *until: str, settings: dict = SETTINGS) -> None:
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    runs.train(
        run, "transformer", "--size", "tiny", "--data", str(pieces()), "--tokenizer", "pretokenised", "--seed", "1",
        *until, "--metric", "loss", "--metric", "bleu", *sets, "--threads", str(threads),
    )  # fmt: skip


def quick(run: Path, threads: int) -> None:
    """Train a run with a BLEU of about 36 on dev, if there is none."""
    if not (run / "model.safetensors").exists():
        minutes = 24 / (threads or torch.get_num_threads())
        results.console.print(f"there is no such run: {minutes:.0f} minutes of training come first")
        train(run, threads, "--minutes", f"{minutes:.0f}", settings=QUICK)


def detokenised(run: Path, year: str, raw: str) -> tuple[float, str]:
    """Return sacreBLEU against the raw text."""
    sources, references = runs.lines_of(pieces() / f"test.{year}.en.gz"), runs.lines_of(results.data(f"multi30k/{raw}"))
    join = MosesDetokenizer(lang="de").detokenize
    answers = [join(join_subwords(found[0].text).split()) for found in load(run).predict(sources, DecodeConfig(beam=5))]
    metric = sacrebleu.BLEU(lowercase=True)
    return metric.corpus_score(answers, [references]).score, str(metric.get_signature())


def tokenised(run: Path, year: str) -> dict:
    both = ",".join(str(pieces() / f"test.{year}.{side}.gz") for side in ("en", "de"))
    return runs.evaluate(run, "--data", both, "--metric", "bleu", "--beam", "5")


def picture(points: list[tuple[float, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(6, 3.2), layout="constrained")
    axes = drawn.add_subplot(xlabel="minutes", ylabel="BLEU, dev, greedy", title="Transformer-Tiny on Multi30k en-de")
    axes.plot(*zip(*points, strict=True), marker="o", markersize=3)
    axes.grid(alpha=0.3)
    drawn.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, default=Path("runs/multi30k"))
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="put the result into bench/RESULTS.md")
    given = parser.parse_args()
    train(given.run, given.threads, "--steps", "8000")
    rows = []
    for year, raw in (("2016", "test_2016_flickr.de.gz"), ("2017", "test_2017_flickr.de.gz")):
        told, (plain, signature) = tokenised(given.run, year), detokenised(given.run, year, raw)
        published = f"{PUBLISHED}" if year == "2016" else ""
        rows.append([f"test {year}", f"{told['scores']['bleu']:.2f}", published, f"{plain:.2f}"])
        speed = told["counts"]["answers"] / told["seconds"]["answers"]
    points = runs.curve(given.run, "bleu")
    text = [
        f"- {results.conditions(given.threads)}",
        f"- Seed 1; {runs.steps(given.run):,} steps in {runs.minutes(given.run):.0f} minutes, evaluations included; "
        f"beam 5 translates {speed:.0f} sentences/s.",
        f"- Detokenised: {signature}",
        "",
        *results.table(["", "BLEU, tokens", "published", "sacreBLEU, detokenised"], rows),
        "",
        "How it grew (dev, greedy; one model, not averaged):",
        "",
        *results.table(["minutes", "BLEU"], [[f"{m:.0f}", f"{v:.1f}"] for m, v in runs.some(points)]),
    ]
    if given.write:
        picture(points, Path(__file__).parents[1] / "docs" / "multi30k.png")
        results.write("Multi30k: Transformer-Tiny, English to German", [*text, "", "![BLEU](../docs/multi30k.png)"])


if __name__ == "__main__":
    tune()
    main()
