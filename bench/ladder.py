"""From recurrence to attention: translation with recurrence and attention (2015) and with attention alone (2017), on
the same data, in the same batches, for the same time.

    python bench/ladder.py --minutes 25 --write

All are small enough to train within the time. The Transformer is pre-norm: post-norm, as in 2017, it needs an hour
(bench/multi30k.py gives it that).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import multi30k
import results
import runs

RUNGS = {
    "seq2seq-bahdanau": {"train.lr": "0.002"},
    "seq2seq-luong": {"train.lr": "0.002"},
    "transformer": {"train.lr": "0.003", "model.encoder.layer.0.wiring": "pre", "model.decoder.layer.0.wiring": "pre"},
}


def rung(name: str, run: Path, minutes: float, threads: int) -> list[str]:
    own = [word for key, value in RUNGS[name].items() for word in ("--set", f"{key}={value}")]
    runs.train(
        run, name, "--size", "tiny", "--data", str(multi30k.pieces()), "--tokenizer", "pretokenised", "--seed", "1",
        "--minutes", str(minutes), "--metric", "bleu", "--batch-tokens", "1024", "--label-smoothing", "0.1",
        "--set", "train.warmup=200", "--set", "train.schedule=linear", "--set", "model.dropout=0.1",
        "--threads", str(threads), *own,
    )  # fmt: skip
    told = multi30k.tokenised(run, "2016")
    about = json.loads((run / "run.json").read_text())
    epochs = [json.loads(line)["epoch"] for line in (run / "metrics.jsonl").read_text().splitlines() if "epoch" in line]
    speed = told["counts"]["answers"] / told["seconds"]["answers"]
    return [
        name, f"{about['parameters'] / 1e6:.2f} M", f"{runs.minutes(run):.1f}", f"{epochs[-1]:.1f}",
        f"{told['scores']['bleu']:.2f}", f"{speed:.0f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/ladder"))
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="put the result into bench/RESULTS.md")
    given = parser.parse_args()
    rows = [rung(name, given.runs / name, given.minutes, given.threads) for name in RUNGS]
    head = ["recipe, size tiny", "parameters", "minutes", "epochs", "BLEU, test 2016, tokens", "sentences/s, beam 5"]
    text = [
        f"- {results.conditions(given.threads)}",
        "- Multi30k en-de, the same pieces, batches of 1024 tokens, Adam with a linear schedule, seed 1.",
        "- Highest learning rate 0.002; for the Transformer, with pre-norm, 0.003.",
        "",
        *results.table(head, rows),
    ]
    if given.write:
        results.write("The ladder: from recurrence to attention", text)


if __name__ == "__main__":
    main()
