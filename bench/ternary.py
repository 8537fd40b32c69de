"""BitNet: a packed model, whose file and memory are many times smaller, has exactly the same logits.

    python bench/ternary.py --write

A BitNet is trained on tiny Shakespeare by characters and packed by `regard pack`. Each of the two folders is then
opened in a new process, which prints its logits of unseen text, and the memory that is freed when the model is dropped.
Needs Linux. Data: ../shared/data/tinyshakespeare.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import regard
import results
import runs
import shakespeare

LENGTH, ROWS = 128, 64  # characters whose scores are compared
SETTINGS = {
    "model.width": 512,
    "model.heads": 8,
    "model.layer.0.feedforward.hidden": 1408,
    "train.context_length": LENGTH,
    "train.batch_size": 16,
    "train.optimizer": "adamw",
    "train.schedule": "cosine",
    "train.lr": 0.001,
    "train.warmup": 100,
}


def held() -> int:
    """Return the bytes that this process shares with no other, after free memory has been returned to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


@torch.no_grad()
def probe(folder: Path, text: Path, scores: Path, threads: int) -> dict[str, Any]:
    """Measure in a new process: the model's memory, its logits and its speed."""
    torch.set_num_threads(threads)
    run = regard.load(folder)
    tensors = sum(t.nbytes for t in (*run.model.parameters(), *run.model.buffers()))
    ids = run.source.encode([text.read_text(encoding="utf-8")])[0][: ROWS * LENGTH]
    rows = torch.tensor(ids).view(ROWS, LENGTH)
    np.save(scores, torch.cat([run.model(some) for some in rows.split(8)]).numpy())
    state = run.model.start(1, 64)
    spent = []
    for at in range(64):
        begun = time.perf_counter()
        _, state = run.model.step(rows[:1, at : at + 1], state)
        spent.append(time.perf_counter() - begun)
    before = held()
    del run, state, _
    return {"resident": before - held(), "tensors": tensors, "speed": 1 / statistics.median(spent)}


def asked(folder: Path, text: Path, scores: Path, threads: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--probe", str(folder), str(text), str(scores), "--threads", str(threads)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--run", type=Path, default=Path("runs/ternary"))
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="put the result into bench/RESULTS.md")
    parser.add_argument("--probe", type=Path, nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.probe:
        print(json.dumps(probe(*given.probe, given.threads)))
        return
    texts = shakespeare.parts(given.run.with_name(given.run.name + "-data"))
    runs.train(
        given.run, "bitnet", "--size", "tiny", "--data", str(texts[0]), "--dev", str(texts[1]), "--tokenizer",
        "characters", "--minutes", str(given.minutes), "--seed", "1", "--threads", str(given.threads),
        *(word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")),
    )  # fmt: skip
    small = given.run.with_name(given.run.name + "-packed")
    shutil.rmtree(small, ignore_errors=True)
    subprocess.run([*runs.REGARD, "pack", str(given.run), str(small)], check=True)
    rows: list[list[str]] = []
    files, said, told = [], [], []
    for name, folder in (("float32", given.run), ("packed", small)):
        scores = given.run.with_name(f"{given.run.name}-{name}.npy")
        told.append(asked(folder, texts[1], scores, given.threads))
        said.append(np.load(scores))
        scores.unlink()
        files.append((folder / "model.safetensors").stat().st_size)
        unsure = runs.evaluate(folder, "--data", str(texts[1]))["scores"]["perplexity"]
        sizes = (files[-1], told[-1]["tensors"], told[-1]["resident"])
        rows.append([name, *(f"{size / 1e6:.2f} MB" for size in sizes), f"{unsure:.6f}", f"{told[-1]['speed']:.0f}"])
    smaller = [f"{a / b:.1f}" for a, b in (files, *([one[key] for one in told] for key in ("tensors", "resident")))]
    rows.append(["times smaller", *smaller, "", ""])
    same = "equal, bit by bit" if np.array_equal(*said) else f"apart by {np.abs(said[0] - said[1]).max():.2g}"
    text = [
        f"- {results.conditions(given.threads)} Seed 1, {given.minutes:g} minutes, {runs.steps(given.run):,} steps.",
        f"- The two models' logits of {said[0].shape[0] * said[0].shape[1]:,} characters are {same}.",
        "- Process: the memory, not shared with other processes, that is freed when the model is dropped.",
        "",
        *results.table(["weights", "file", "tensors", "process", "perplexity", "tokens/s, one row"], rows),
    ]
    if given.write:
        results.write("BitNet: packed to two bits", text)


if __name__ == "__main__":
    main()
