"""Spelling to pronunciation on the CMU dictionary, beside the package g2p_en on the same words.

    python bench/g2p.py --write          three hours on one core; stopped, it goes on where it was

Data: ../shared/data/cmudict-g2p. Stress is left out, and a word counts as right if it matches any of its listed
pronunciations. g2p_en answers by its network alone, which has learned from the whole dictionary, test words included.
Needs: pip install -c constraints.txt -e .[bench]
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import results
import runs
from regard.evaluate import gather
from regard.metrics import measure

SETTINGS = {  # spelling is a matter of neighbours, so that places are told relative to each other as well
    "model.width": 128,
    "model.heads": 4,
    "model.encoder.depth": 4,
    "model.decoder.depth": 2,
    "model.tie": "target",
    "model.dropout": 0.0,  # words seen and unseen err alike, so that there is nothing to hold back
    "model.encoder.layer.0.mixer.position": "rotary",
    "model.decoder.layer.0.mixer.position": "rotary",
    "model.decoder.layer.0.cross.position": "rotary",
    "model.encoder.layer.0.feedforward.hidden": 512,
    "model.decoder.layer.0.feedforward.hidden": 512,
    "train.batch": 512,
    "train.accumulate": 2,  # two lengths of words in a step
    "train.optimiser": "muon",
    "train.lr": 0.003,
    "train.warmup": 500,
    "train.weight_decay": 0.05,
    "train.schedule": "linear",
    "train.smoothing": 0.1,
    "train.ema": 0.9995,
}
METRICS = ("sequence_error", "token_error")


def tables(folder: Path) -> Path:
    """The data without stress, each pronunciation once."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "dev", "test"):
        lines = (line.split("\t") for line in runs.lines_of(results.data(f"cmudict-g2p/{part}.tsv.gz")))
        plain = dict.fromkeys((word, re.sub(r"\d", "", sounds)) for word, sounds in lines)
        (folder / f"{part}.tsv").write_text("".join(f"{word}\t{sounds}\n" for word, sounds in plain))
    return folder


def answers_of_peer(words: list[str]) -> tuple[list[str], float]:
    """g2p_en's pronunciations without stress, and words per second."""
    from g2p_en import g2p

    g2p.cmudict = SimpleNamespace(dict=dict)  # no dictionary to look up: its network answers
    network = g2p.G2p()
    begun = time.perf_counter()
    answers = [" ".join(re.sub(r"\d", "", sound) for sound in network.predict(word)) for word in words]
    return answers, len(words) / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, default=Path("runs/cmudict"))
    parser.add_argument("--steps", type=int, default=31_000)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="put the result into bench/RESULTS.md")
    given = parser.parse_args()
    data = tables(given.run.with_name(given.run.name + "-data"))
    sets = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    runs.train(
        given.run, "transformer", "--size", "tiny", "--data", str(data), "--tokenizer", "characters,pretokenised",
        "--any-reference", "--seed", "1", "--steps", str(given.steps), "--metric", "sequence_error",
        "--metric", "token_error", *sets, "--threads", str(given.threads),
    )  # fmt: skip
    asked = [word for name in METRICS for word in ("--metric", name)]
    test = data / "test.tsv"
    told = runs.evaluate(given.run, "--data", str(test), "--any-reference", "--beam", str(given.beam), *asked)
    words, references = gather([tuple(line.split("\t")) for line in test.read_text().splitlines()], True)
    answers, speed = answers_of_peer(words)
    rows = [
        ["regard, transformer", *(f"{told['scores'][name]:.1f} %" for name in METRICS),
         f"{len(words) / told['seconds']['answers']:.0f}"],
        ["g2p_en", *(f"{score.value:.1f} %" for score in measure(METRICS, answers, references)), f"{speed:.0f}"],
    ]  # fmt: skip
    parameters = json.loads((given.run / "run.json").read_text())["parameters"]
    text = [
        f"- {results.conditions(given.threads)}",
        f"- Seed 1; {parameters / 1e6:.2f} M parameters, {runs.steps(given.run):,} steps in "
        f"{runs.minutes(given.run):.0f} minutes; {len(words):,} test words, stress left out, any listed pronunciation "
        f"right, beam {given.beam}. g2p_en has learned from the whole dictionary, the test words among it.",
        "",
        *results.table(["", "word error", "phoneme error", "words/s"], rows),
    ]
    if given.write:
        results.write("CMUdict: spelling to pronunciation", text)


if __name__ == "__main__":
    main()
