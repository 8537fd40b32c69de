"""Small vision transformers from scratch: handwritten digits, and small photographs of ten classes.

    python bench/images.py --write          a quarter of an hour on two cores; resumes after an interruption

Data: ../shared/data/mnist and ../shared/data/cifar10-jpeg-subset (1,200 pictures a class instead of 5,000). The test
parts are the data sets' own; a twentieth of the training part is the dev set.
"""

from __future__ import annotations

import argparse
import gzip
import json
import zipfile
from pathlib import Path

import numpy as np

import results
import runs

SETTINGS = {
    "model.depth": 6,
    "train.batch_size": 64,
    "train.optimizer": "adamw",
    "train.weight_decay": 0.05,
    "train.lr": 0.001,
    "train.warmup": 200,
    "train.schedule": "cosine",
    "train.label_smoothing": 0.1,
    "train.metric": "accuracy",
}
DIGITS = {"model.embed.image": 28, "model.embed.channels": 1}


def digits(folder: Path) -> Path:
    """Write MNIST as one file of arrays."""
    path = folder / "mnist.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {}
        for part, name in (("", "train"), ("test_", "t10k")):
            arrays[f"{part}images"] = read_idx(results.data(f"mnist/{name}-images-idx3-ubyte.gz"))
            arrays[f"{part}labels"] = read_idx(results.data(f"mnist/{name}-labels-idx1-ubyte.gz"))
        np.savez(path, **arrays)
    return path


def read_idx(path: Path) -> np.ndarray:
    """Read an IDX file: the number of dimensions in the fourth byte, the dimensions, then bytes."""
    told = gzip.decompress(path.read_bytes())
    count = told[3]
    shape = np.frombuffer(told, ">i4", count, 4)
    return np.frombuffer(told, np.uint8, offset=4 + 4 * count).reshape(shape)


def photographs(folder: Path) -> Path:
    """Unpack the photographs: a folder for each class, in train and test."""
    if not (folder / "test").exists():
        with zipfile.ZipFile(results.data("cifar10-jpeg-subset/images.zip")) as held:
            held.extractall(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/images"))
    parser.add_argument("--minutes", type=float, default=6)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="put the result into bench/RESULTS.md")
    given = parser.parse_args()
    rows = []
    for name, data, own in (
        ("MNIST", digits(given.runs / "data"), DIGITS),
        ("CIFAR-10, JPEG subset", photographs(given.runs / "data" / "cifar"), {}),
    ):
        run = given.runs / name.split(",")[0].lower()
        sets = [word for key, value in (SETTINGS | own).items() for word in ("--set", f"{key}={value}")]
        runs.train(
            run, "vit", "--size", "tiny", "--data", str(data), "--minutes", str(given.minutes), "--seed", "1", *sets,
            "--threads", str(given.threads),
        )  # fmt: skip
        told = runs.evaluate(run)
        size = json.loads((run / "run.json").read_text())["parameters"]
        curve = ", ".join(f"{accuracy:.1f}" for _, accuracy in runs.some(runs.curve(run, "accuracy"), 6))
        rows.append([
            name, f"{size / 1e6:.2f} M", f"{runs.minutes(run):.1f}", f"{runs.steps(run):,}", curve,
            f"{told['scores']['accuracy']:.2f}", f"{told['counts']['pictures']:,}",
        ])  # fmt: skip
    head = ["data", "parameters", "minutes", "steps", "accuracy on dev, over time", "accuracy on test", "test pictures"]
    text = [
        f"- {results.conditions(given.threads)}",
        "- `vit`, size tiny with 6 layers, from scratch, nothing added.",
        "",
    ]
    text += results.table(head, rows)
    if given.write:
        results.write("Pictures: small vision transformers from scratch", text)


if __name__ == "__main__":
    main()
