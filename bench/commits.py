"""Speed compared with an older commit of regard: training, greedy generation and, with --runs, translation.

    python bench/commits.py 6c8e56c --write          fifteen minutes on two cores

The older commit is checked out beside this one, and each converts the same Hugging Face models for itself; both run
their own workers of bench/peers in turn. --runs names two run folders with the same weights, the older commit's first,
since the format of a run may have changed.
Needs: pip install -c constraints.txt -e .[bench]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import generate
import results
import runs
import train
from race import Contender, race, ratios, speeds
from translate import sources

HERE = Path(__file__).parents[1]
KINDS = {"pairs": train.pairs, "text": lambda: train.text(256, 16), "masked": lambda: train.masked(128, 32)}

TRANSLATION = {"translate": ("5",), "one sentence, greedy": ("1", "one"), "one sentence, beam 4": ("4", "one")}


class Commit:
    """A tree of regard with its own benchmark workers."""

    def __init__(self, name: str, tree: Path):
        self.name, self.tree = name, tree

    def convert(self, model: Path, run: Path) -> None:
        subprocess.run(
            [*runs.REGARD, "convert", str(model), str(run)], check=True, stdout=subprocess.DEVNULL,
            cwd=self.tree, env=os.environ | {"PYTHONPATH": str(self.tree)},
        )  # fmt: skip

    def contender(self, script: str, *given: str, threads: int) -> Contender:
        os.environ["PYTHONPATH"] = str(self.tree)
        return Contender(self.name, str(self.tree / "bench" / "peers" / script), *given, threads=threads)


def compare(kind: str, commits: list[Commit], folder: Path, given: argparse.Namespace) -> list[list[str]]:
    """Return the rows of one job."""
    threads, what, words, made = given.threads or 2, "tokens", (), []
    if kind in KINDS:
        data = KINDS[kind]()  # type: ignore[operator]
        data["batches"] = data["batches"][: (given.rounds + 1) * given.steps]
        (folder / "batches.json").write_text(json.dumps(data))
        train.hugging(kind, folder / kind)
        words = (str(given.steps),)
    elif kind in TRANSLATION:
        count = 300 if kind == "translate" else 60
        (folder / "sources.json").write_text(json.dumps(sources(Path(given.runs[1]), count)))
    else:
        generate.hugging(folder / kind)
    for number, commit in enumerate(commits):
        run = folder / f"{kind}-{number}"
        if kind in TRANSLATION:
            beam, *one_by_one = TRANSLATION[kind]
            file = str(folder / "sources.json")
            asked = ("translate.py", "ours", given.runs[number], file, beam, str(threads), *one_by_one)
            what = "sentences"
        else:
            commit.convert(folder / kind, run)
            if kind in KINDS:
                asked = ("ours.py", str(run), str(folder / "batches.json"), kind)
            else:
                rows = kind.removeprefix("generate")
                asked = ("generate.py", "ours", str(run), rows, "128", "128", str(threads))
        made.append(commit.contender(*asked, threads=threads))
    race(made, given.rounds, *words)
    before, now = made
    table = [
        [kind, one.name, f"{sorted(speeds(one, what))[given.rounds // 2]:,.0f}", ratios(now, one, what)]
        for one in (before, now)
    ]
    for one in made:
        one.end()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("commit")
    parser.add_argument("--kinds", default="pairs,text,masked,generate1,generate16")
    parser.add_argument("--runs", nargs=2, metavar=("BEFORE", "NOW"), help="also translate with these run folders")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of each contender in a round of training")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="put the result into bench/RESULTS.md")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        if subprocess.run(["git", "-C", str(HERE), "worktree", "add", "--detach", str(tree), given.commit]).returncode:
            sys.exit(f"there is no commit {given.commit} here")
        try:
            commits = [Commit(given.commit, tree), Commit("now", HERE)]
            kinds = [*given.kinds.split(","), *(TRANSLATION if given.runs else ())]
            rows = [row for kind in kinds for row in compare(kind, commits, Path(folder), given)]
        finally:
            subprocess.run(["git", "-C", str(HERE), "worktree", "remove", "--force", str(tree)])
    head = ["job", "commit", "tokens/s, sentences/s", "now is faster by"]
    lines = [
        f"- {results.conditions(given.threads)}",
        f"- {given.rounds} rounds in turn; medians, and from the least to the most.",
        "",
        *results.table(head, rows),
    ]
    if given.write:
        results.write(f"Speed compared with {given.commit}", lines)


if __name__ == "__main__":
    main()
