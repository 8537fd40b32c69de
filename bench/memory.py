"""How much memory a large corpus takes: millions of generated pairs, read, split, tokenized, prepared and batched.

    python bench/memory.py                      # 5 million pairs, in a temporary folder
    python bench/memory.py --pairs 200000 --seconds 5

The work is done in a process of its own, whose peak of resident memory is told after every stage. Pages of the prepared
file that are mapped into memory count as resident, although the system can take them back at any time.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WORDS = 50_000
CHUNK = 100_000
LIMIT = 2.0  # GiB


def generate(path: Path, pairs: int, seed: int = 1) -> None:
    """Sentences of 3 to 10 words, frequent ones first; the target says each in another language, backwards."""
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


def peak() -> float:
    """GiB of resident memory at the worst moment so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def stage(name: str, work: Callable[[], Any]) -> Any:
    begun, busy = time.perf_counter(), time.process_time()
    result = work()
    wall, cpu = time.perf_counter() - begun, time.process_time() - busy
    print(f"{name:<24} {wall:7.1f} s, {cpu:7.1f} s of a core   peak {peak():.2f} GiB", flush=True)
    return result


def work(folder: Path, size: int, budget: int, seconds: float) -> None:
    from regard.data import Bucketed, Feed, Tokenizer, open_corpus, prepare

    corpus = stage("read and split", lambda: open_corpus(folder / "pairs.tsv"))
    tokenizer = stage("learn the tokenizer", lambda: Tokenizer.train("bpe", corpus.train.texts(), size))
    train = stage("prepare train", lambda: prepare(corpus.train, (tokenizer, tokenizer), folder / "train.arrow"))
    stage("prepare dev", lambda: prepare(corpus.dev, (tokenizer, tokenizer), folder / "dev.arrow"))
    feed = Feed(Bucketed(train, budget, 1, tokenizer.start, tokenizer.pad))

    def batches() -> int:
        end, count = time.perf_counter() + seconds, 0
        while time.perf_counter() < end:
            count += next(feed).count
        return count

    tokens = stage("batches", batches)
    print(
        f"{len(train):,} pairs, a vocabulary of {tokenizer.size:,}, {tokens:,} target tokens in batches of {budget:,}"
    )
    print(f"peak memory {peak():.2f} GiB ({'within' if peak() <= LIMIT else 'MORE THAN'} {LIMIT:.0f} GiB)")
    sys.exit(0 if peak() <= LIMIT else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=5_000_000)
    parser.add_argument("--size", type=int, default=8000, help="of the vocabulary")
    parser.add_argument("--budget", type=int, default=4096, help="tokens in a batch")
    parser.add_argument("--seconds", type=float, default=60.0, help="of making batches")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.size, given.budget, given.seconds)
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder) / "pairs.tsv", given.pairs)
        print(f"{given.pairs:,} pairs in {(Path(folder) / 'pairs.tsv').stat().st_size / 2**20:.0f} MiB", flush=True)
        sys.exit(subprocess.run([sys.executable, __file__, *sys.argv[1:], "--work", folder]).returncode)


if __name__ == "__main__":
    main()
