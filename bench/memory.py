"""Memory for a large corpus: millions of generated pairs are read, split, tokenized, prepared and trained on.

    python bench/memory.py --write              # 5 million pairs and a minute of training, in a temporary folder
    python bench/memory.py --pairs 200000 --minutes 0.2

The work is done in a new process; the peak of resident memory includes its worker processes. Pages of the prepared file
that are mapped into memory count as resident, although the system can take them back at any time.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import results
from peers.worker import Held

WORDS = 50_000
CHUNK = 100_000
LIMIT = 2.0  # GiB


def generate(path: Path, pairs: int, seed: int = 1) -> None:
    """Write pairs of 3 to 10 words from a skewed distribution; the target has other words, in reverse order."""
    rng = np.random.default_rng(seed)
    one, other = (
        np.array([_word(rng, letters) for _ in range(WORDS)], object) for letters in ("aeioutnsrl", "äöüekmpvzx")
    )
    with open(path, "w", encoding="utf-8") as file:
        for begin in range(0, pairs, CHUNK):
            count = min(CHUNK, pairs - begin)
            ends = rng.integers(3, 11, count).cumsum()
            chosen = (WORDS * rng.random(ends[-1]) ** 4).astype(np.int64)
            sources, targets = one[chosen].tolist(), other[chosen].tolist()
            for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
                file.write(f"{' '.join(sources[start:end])}\t{' '.join(reversed(targets[start:end]))}\n")


def _word(rng: np.random.Generator, letters: str) -> str:
    return "".join(rng.choice(list(letters), int(rng.integers(2, 9))))


def peak(held: Held) -> float:
    """Return the peak of resident memory so far, in GiB."""
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, held.most / 2**10)


def work(folder: Path, size: int, budget: int, minutes: float) -> None:
    """Print as JSON the seconds and the peak after preparing and after training."""
    held = Held()
    from regard.machine import tune
    from regard.runs.job import Job
    from regard.train.job import start

    tune()

    ends = [f"train.minutes={minutes}", f"train.batch_tokens={budget}", "train.warmup=200"]
    job = Job(
        "transformer", str(folder / "run"), "tiny", ends, str(folder / "pairs.tsv"), tokenizer="bpe", vocab=size,
        dev="2000",
    )  # fmt: skip
    begun = time.perf_counter()
    prepared = start(job, say=lambda text: print(text, file=sys.stderr))
    told = {"prepared": time.perf_counter() - begun, "prepared_peak": peak(held)}
    prepared.train()
    learner = prepared.trainer.learner
    told |= {
        "peak": peak(held),
        "steps": learner.step,
        "tokens": learner.tokens,
        "loss": prepared.trainer.metrics["loss"],
    }
    print(json.dumps(told))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=5_000_000)
    parser.add_argument("--size", type=int, default=8000, help="of the vocabulary")
    parser.add_argument("--budget", type=int, default=4096, help="tokens in a batch")
    parser.add_argument("--minutes", type=float, default=1.0, help="of training")
    parser.add_argument("--write", action="store_true", help="put the result into bench/RESULTS.md")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.size, given.budget, given.minutes)
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder) / "pairs.tsv", given.pairs)
        size = (Path(folder) / "pairs.tsv").stat().st_size / 2**20
        results.console.print(f"{given.pairs:,} pairs in {size:.0f} MiB")
        again = [sys.executable, __file__, *sys.argv[1:], "--work", folder]
        told = json.loads(subprocess.run(again, stdout=subprocess.PIPE, check=True).stdout)
    rows = [
        ["read, split, tokenizer learned, prepared", f"{told['prepared']:.0f} s", f"{told['prepared_peak']:.2f} GiB"],
        [f"trained: {told['steps']} steps, {told['tokens']:,} target tokens, dev loss {told['loss']:.2f}",
         f"{60 * given.minutes:.0f} s", f"{told['peak']:.2f} GiB"],
    ]  # fmt: skip
    text = [
        f"- {results.conditions()}",
        f"- {given.pairs:,} pairs, {size:.0f} MiB of TSV; transformer, size tiny, BPE of {given.size:,}, batches of "
        f"{given.budget:,} tokens. Pages of the prepared file that are mapped into memory count.",
        "",
        *results.table(["stage", "time", "peak of resident memory so far"], rows),
    ]
    if given.write:
        results.write("Memory: five million pairs", text)
    sys.exit(0 if told["peak"] <= LIMIT else 1)


if __name__ == "__main__":
    main()
