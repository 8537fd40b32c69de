"""A character language model on tiny Shakespeare, in nanoGPT's setting for a CPU: 4 layers, 4 heads, width 128, context
64, batches of 12, 2,000 steps; its README gives a validation loss of 1.88.

    python bench/shakespeare.py --write
    python bench/shakespeare.py --nanogpt FOLDER       with a checkout of github.com/karpathy/nanoGPT, in one run

Data: ../shared/data/tinyshakespeare, the first 90 % for training, the rest for validation.
"""

from __future__ import annotations

import argparse
import gzip
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import results
import runs

SETTINGS = {
    "train.batch_size": 12,
    "train.context_length": 64,
    "train.optimizer": "adamw",
    "train.lr": 0.001,
    "train.min_lr_ratio": 0.1,
    "train.schedule": "cosine",
    "train.warmup": 100,
    "train.beta2": 0.99,
    "train.weight_decay": 0.1,
    "train.eval_steps": 1000,
}
THEIRS = {
    "device": "cpu",
    "compile": "False",
    "eval_iters": 20,
    "eval_interval": 250,
    "log_interval": 100,
    "block_size": 64,
    "batch_size": 12,
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 128,
    "max_iters": 2000,
    "lr_decay_iters": 2000,
    "dropout": 0.0,
}


def parts(folder: Path) -> tuple[Path, Path]:
    """Write the two parts of the text and return their paths."""
    text = gzip.decompress(results.data("tinyshakespeare/input.txt.gz").read_bytes()).decode()
    folder.mkdir(parents=True, exist_ok=True)
    cut = int(0.9 * len(text))
    paths = folder / "train.txt", folder / "dev.txt"
    for path, part in zip(paths, (text[:cut], text[cut:]), strict=True):
        path.write_text(part, encoding="utf-8")
    return paths


def nanogpt(checkout: Path, train: Path, dev: Path) -> list[str]:
    """Run nanoGPT's own script in its own setting, on the same two parts."""
    folder = checkout / "data" / "shakespeare_char"
    texts = [path.read_text(encoding="utf-8") for path in (train, dev)]
    letters = sorted(set("".join(texts)))
    numbers = {letter: i for i, letter in enumerate(letters)}
    for name, text in zip(("train", "val"), texts, strict=True):
        np.array([numbers[letter] for letter in text], np.uint16).tofile(folder / f"{name}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(letters), "stoi": numbers, "itos": letters}))
    begun = time.perf_counter()
    command = [
        sys.executable,
        "train.py",
        "config/train_shakespeare_char.py",
        *(f"--{k}={v}" for k, v in THEIRS.items()),
    ]
    done = subprocess.run(command, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True)
    taken = time.perf_counter() - begun
    losses = [line.rpartition(" ")[2] for line in done.stdout.splitlines() if line.startswith("step ")]
    return ["nanoGPT's train.py", "", f"{taken:.0f} s", losses[-1], "20 random batches"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, default=Path("runs/shakespeare"))
    parser.add_argument("--nanogpt", type=Path, help="a checkout of it")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="put the result into bench/RESULTS.md")
    given = parser.parse_args()
    train, dev = parts(given.run.with_name(given.run.name + "-data"))
    sets = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    begun = time.perf_counter()
    runs.train(
        given.run, "transformer-decoder", "--size", "nano", "--data", str(train), "--dev", str(dev), "--tokenizer",
        "characters", "--steps", "2000", "--seed", "1", *sets, "--threads", str(given.threads),
    )  # fmt: skip
    taken = time.perf_counter() - begun
    final = runs.evaluate(given.run, "--data", str(dev), "--metric", "loss")
    own = ["regard", "transformer-decoder, size nano", f"{taken:.0f} s", f"{final['scores']['loss']:.4f}", "all of it"]
    rows = [own, *([nanogpt(given.nanogpt, train, dev)] if given.nanogpt else [])]
    head = ["", "model", "whole command", "validation loss", "over"]
    text = [f"- {results.conditions(given.threads)} Seed 1. Published: 1.88.", "", *results.table(head, rows)]
    if given.write:
        results.write("Tiny Shakespeare in nanoGPT's setting for a CPU", text)


if __name__ == "__main__":
    main()
