"""Spelling to pronunciation on the CMU dictionary, compared with the package g2p_en on the same words.

    python bench/g2p.py --write          three hours on two cores; resumes after an interruption

The first model is that of `regard demo --full`, on one core. After a while, a second one branches off on the other
core, with another seed and a new learning rate schedule; a third one continues from the second in the same way, with
more dropout; then all three are an ensemble. Data: ../shared/data/cmudict-g2p.
Stress is left out, and an answer is correct if it matches any of the listed pronunciations. g2p_en answers by its
network alone, which was trained on the whole dictionary, test words included.
Needs: pip install -c constraints.txt -e .[bench]
"""

from __future__ import annotations

import argparse
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import results
import runs
from regard.demo import FULL
from regard.metrics import measure
from regard.tasks.dev import group_references

SEARCH = ("--beam", "5", "--length-penalty", "1.2", "--early-stopping", "never")  # chosen on dev
AGAIN = {"train.lr": 0.003, "train.warmup": 100}  # of those that begin with another's weights
METRICS = ("sequence_error", "token_error")


def tables(folder: Path) -> Path:
    """Write the data without stress, each pronunciation once."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "dev", "test"):
        lines = (line.split("\t") for line in runs.lines_of(results.data(f"cmudict-g2p/{part}.tsv.gz")))
        plain = dict.fromkeys((word, re.sub(r"\d", "", sounds)) for word, sounds in lines)
        (folder / f"{part}.tsv").write_text("".join(f"{word}\t{sounds}\n" for word, sounds in plain))
    return folder


def answers_of_peer(words: list[str]) -> tuple[list[str], float]:
    """Return g2p_en's pronunciations without stress, and words per second."""
    from g2p_en import g2p

    g2p.cmudict = SimpleNamespace(dict=dict)  # no dictionary to look up: its network answers
    network = g2p.G2p()
    begun = time.perf_counter()
    answers = [" ".join(re.sub(r"\d", "", sound) for sound in network.predict(word)) for word in words]
    return answers, len(words) / (time.perf_counter() - begun)


def learn(run: Path, data: Path, minutes: float, *begin: str, **own: float) -> None:
    """Train one model on one core. begin: the arguments that name a recipe or a run to begin with."""
    shared = {name: value for name, value in FULL.items() if "--from" not in begin or name.startswith("train.")}
    settings = shared | (AGAIN if "--from" in begin else {}) | own
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    asked = [word for name in METRICS for word in ("--metric", name)]
    runs.train(
        run, *begin, "--data", str(data), "--any-reference", "--minutes", str(minutes), *asked, *sets, "--threads", "1"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/cmudict"))
    parser.add_argument("--minutes", type=float, default=118)
    parser.add_argument("--branch", type=float, default=49, help="minutes after which the second one begins")
    parser.add_argument("--third", type=float, default=62, help="minutes of the third one")
    parser.add_argument("--write", action="store_true", help="put the result into bench/RESULTS.md")
    given = parser.parse_args()
    data = tables(given.runs / "data")
    members = one, two, three = [given.runs / name for name in ("one", "two", "three")]
    branch = ("--from", str(one))

    def one_core() -> None:
        begin = ("transformer", "--size", "tiny", "--tokenizer", "characters,pretokenised")
        learn(one, data, given.minutes, *begin, **{"train.seed": 2})
        learn(three, data, given.third, *branch, **{"train.seed": 4, "model.dropout": 0.1})

    with ThreadPoolExecutor() as pool:
        first = pool.submit(one_core)
        while not first.done() and (not (one / "metrics.jsonl").exists() or runs.minutes(one) < given.branch):
            time.sleep(5)
        learn(two, data, given.minutes - given.branch, *branch, **{"train.seed": 3})
        first.result()
    asked = [word for name in METRICS for word in ("--metric", name)]
    asked += ["--data", str(data / "test.tsv"), "--any-reference", *SEARCH]
    words, references = group_references(
        [tuple(line.split("\t")) for line in (data / "test.tsv").read_text().splitlines()], True
    )
    rows = []
    together = [word for run in members[1:] for word in ("--ensemble", str(run))]
    for name, run, beside in (*((run.name, run, []) for run in members), ("all together", one, together)):
        told = runs.evaluate(run, *beside, *asked)
        scores = [f"{told['scores'][metric]:.2f} %" for metric in METRICS]
        rows.append([f"regard, {name}", *scores, f"{len(words) / told['seconds']['answers']:.0f}"])
    answers, speed = answers_of_peer(words)
    rows.append(
        ["g2p_en", *(f"{score.value:.2f} %" for score in measure(METRICS, answers, references)), f"{speed:.0f}"]
    )
    parameters = json.loads((one / "run.json").read_text())["parameters"]
    learned = [f"'{run.name}' {runs.steps(run):,} steps in {runs.minutes(run):.0f} minutes" for run in members]
    text = [
        f"- {results.conditions(1)}",
        f"- Seeds 2 to 4; {parameters / 1e6:.2f} M parameters each, one core each: {', '.join(learned)}. 'two' begins "
        f"with the weights of 'one' after {given.branch:g} minutes, 'three' with its last ones.",
        f"- {len(words):,} test words, stress left out, any listed pronunciation correct, decoded with "
        f"`{' '.join(SEARCH)}`, which is chosen on dev. Together: an ensemble that averages probabilities. "
        "g2p_en was trained on the test words, too.",
        "",
        *results.table(["", "word error", "phoneme error", "words/s"], rows),
    ]
    if given.write:
        results.write("CMUdict: spelling to pronunciation", text)


if __name__ == "__main__":
    main()
