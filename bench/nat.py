"""Decoders that write all tokens at once, compared with autoregressive ones: quality and latency of each, on the same
data, with the same number of steps.

    python bench/nat.py --write                           three to four hours on two cores; can be interrupted
    python bench/nat.py --pair tatoeba-cmn-eng --write    a second pair of languages with the same settings

Every run is `regard train RECIPE --size tiny --steps N` and nothing else: the teacher on the pairs as they are, all
others on these (raw) or on the teacher's answers (distilled, --teacher). The teacher is also the judge of --rescore.
sacreBLEU is cased and detokenized, on the test part. Latency is that of `run.predict` on so many sentences at a time;
all systems take turns. --only trains and measures some recipes; runs that are not there have no row.

Data: ../shared/data. Needs: pip install -c constraints.txt -e .[bench]
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

import results
import runs
from regard import load
from regard.data import open_corpus
from regard.machine import tune

SIZES = (1, 8, 64)  # sentences at a time
MEASURED = 64  # sentences of a measurement
PAIRS = {
    "multi30k": (
        ("train.{}.gz", "val.{}.gz", "test_2016_flickr.{}.gz"), ("en", "de"), "English to German, raw text, test 2016",
    ),
    "tatoeba-cmn-eng": (("train.tsv.gz", "dev.tsv.gz", "test.tsv.gz"), ("1", "0"), "Chinese to English"),
}  # fmt: skip


class System(NamedTuple):
    """A row of the table: a run, and how it is decoded.

    settings: of its DecodeConfig, besides those of the recipe.
    judged:   the teacher ranks its answers.
    """

    name: str
    recipe: str
    distilled: bool
    settings: dict[str, Any] = {}
    judged: bool = False

    @property
    def run(self) -> str:
        return f"{self.recipe}-distilled" if self.distilled else self.recipe


TEACHER = "transformer-preln"
GREEDY = System("Transformer, greedy (teacher)", TEACHER, False, {"beam": 1})
PARALLEL = {
    "nat": "NAT", "nat-fertility": "NAT with fertilities", "nat-crf": "NAT-CRF", "glat": "GLAT", "nat-ctc": "NAT-CTC",
    "da-transformer": "DA-Transformer", "levenshtein": "Levenshtein",
}  # fmt: skip


def systems() -> list[System]:
    found = [GREEDY, System("Transformer, beam 5", TEACHER, False, {"beam": 5})]
    for distilled in (False, True):
        found.append(System("Deep encoder, shallow decoder, greedy", "deep-shallow", distilled, {"beam": 1}))
        found += [System(name, recipe, distilled) for recipe, name in PARALLEL.items()]
        found += [
            System(f"CMLM, {count} iterations", "cmlm", distilled, {"iterations": count, "length_beam": 3})
            for count in (1, 4, 10)
        ]
    found.append(System("GLAT, 5 lengths, judged", "glat", True, {"length_beam": 5}, judged=True))
    found.append(System("NAT-CTC, beam 10", "nat-ctc", True, {"beam": 10}))
    return found


COMPARED = (  # pairs of rows whose difference has an interval: run and run
    ("glancing, raw", "nat", "glat"),
    ("glancing, distilled", "nat-distilled", "glat-distilled"),
    ("distillation, NAT", "nat", "nat-distilled"),
    ("distillation, GLAT", "glat", "glat-distilled"),
    ("distillation, NAT-CTC", "nat-ctc", "nat-ctc-distilled"),
)


class Bench:
    def __init__(self, pair: str, folder: Path, given: argparse.Namespace):
        (train, dev, test), self.sides, self.title = PAIRS[pair]
        self.folder, self.given, place = folder / pair, given, results.data(pair)
        self.data, self.dev, test = (self._files(place, name) for name in (train, dev, test))
        self.columns = ["--columns", ",".join(self.sides)] if test.endswith(".tsv.gz") else []
        columns = ",".join(self.sides) if self.columns else None
        self.test = list(open_corpus(test, dev=0, test=0, columns=columns).train)
        self.loaded: dict[str, Any] = {}

    def _files(self, place: Path, name: str) -> str:
        return ",".join(str(place / name.format(side)) for side in self.sides) if "{}" in name else str(place / name)

    def train(self, recipe: str, distilled: bool) -> None:
        """Train a run, or go on with it."""
        name = f"{recipe}-distilled" if distilled else recipe
        teacher = ["--teacher", str(self.folder / TEACHER)] if distilled else []
        runs.train(
            self.folder / name, recipe, "--size", "tiny", "--data", self.data, "--dev", self.dev, *self.columns,
            "--steps", str(self.given.steps), "--threads", str(self.given.threads), *teacher, automatic=True,
        )  # fmt: skip

    def is_trained(self, name: str) -> bool:
        return (self.folder / name / "model.safetensors").exists()

    def run(self, system: System) -> Any:
        if system.run not in self.loaded:
            self.loaded[system.run] = load(self.folder / system.run)
        run = self.loaded[system.run]
        if hasattr(run, "rescore"):
            run.rescore = self.run(GREEDY) if system.judged else None
        return run

    def answers(self, system: System, sources: list[str]) -> list[str]:
        run = self.run(system)
        return [found[0].text for found in run.predict(sources, replace(run.config, **system.settings))]

    def milliseconds(self, every: list[System], threads: int, size: int) -> list[float]:
        """Return the median time of a sentence for each system, some sentences at a time, in turn."""
        torch.set_num_threads(threads)
        sources = [source for source, _ in self.test[:MEASURED]]
        took: list[list[float]] = [[] for _ in every]
        for number in range(self.given.rounds + 1):
            for system, times in zip(every, took, strict=True):
                begun = time.perf_counter()
                for begin in range(0, len(sources), size):
                    self.answers(system, sources[begin : begin + size])
                if number:  # the first round is a warm-up
                    times.append(1000 * (time.perf_counter() - begun) / len(sources))
        return [statistics.median(times) for times in took]


def differences(bench: Bench, said: dict[str, list[str]]) -> list[list[str]]:
    """Return the differences of BLEU with their p-values by paired bootstrap resampling (Koehn 2004)."""
    rows, references = [], [[target for _, target in bench.test]]
    for what, before, after in COMPARED:
        if before in said and after in said:
            names = [("before", said[before]), ("after", said[after])]
            _, scores = PairedTest(names, {"BLEU": BLEU()}, references, "bs", n_samples=1000)()
            one, two = scores["BLEU"]
            rows.append([
                what, f"{one.score:.2f}", f"{two.score:.2f}", f"{two.mean:.2f} ± {two.ci:.2f}", f"{two.p_value:.3f}",
            ])  # fmt: skip
    return rows


def picture(points: list[tuple[str, bool, float, float]], path: Path, title: str) -> None:
    """Draw quality against latency. points: name, distilled, milliseconds, BLEU."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8, 5), layout="constrained")
    axes = drawn.add_subplot(xlabel="milliseconds for one sentence, one thread", ylabel="sacreBLEU", title=title)
    axes.set_xscale("log")
    for distilled, marker, label in ((False, "o", "learned from the pairs"), (True, "s", "learned from the teacher")):
        some = [point for point in points if point[1] == distilled]
        axes.scatter([x for _, _, x, _ in some], [y for _, _, _, y in some], marker=marker, s=26, label=label)
    for name, _, x, y in points:
        axes.annotate(name, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=7)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    drawn.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pair", choices=list(PAIRS), default="multi30k")
    parser.add_argument("--runs", type=Path, default=Path("runs/nat"))
    parser.add_argument("--only", action="append", help="a run, such as glat or glat-distilled; repeatable")
    parser.add_argument("--steps", type=int, default=6000, help="of every run")
    parser.add_argument("--threads", type=int, default=0, help="of training")
    parser.add_argument("--rounds", type=int, default=3, help="of the measurements of latency")
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--write", action="store_true", help="put the result into bench/RESULTS.md")
    given = parser.parse_args()
    bench = Bench(given.pair, given.runs, given)
    for name, one in {one.run: one for one in systems()}.items():
        if not given.only or name in given.only or name == TEACHER:
            bench.train(one.recipe, one.distilled)
    if given.train_only:
        return
    every = [one for one in systems() if bench.is_trained(one.run)]
    torch.set_num_threads(given.threads or torch.get_num_threads())
    metric, references, said, scores = BLEU(), [[target for _, target in bench.test]], {}, []
    for one in every:
        answers = bench.answers(one, [source for source, _ in bench.test])
        scores.append(metric.corpus_score(answers, references).score)
        said.setdefault(one.run, answers)
    cores = torch.get_num_threads()
    counts = sorted({1, cores})
    took = {(count, size): bench.milliseconds(every, count, size) for count in counts for size in SIZES}
    torch.set_num_threads(cores)
    head = ["", "targets", "sacreBLEU", "steps", "minutes", "parameters"]
    head += [f"ms, {size} at a time, {count} thread{'s' if count > 1 else ''}" for count, size in took]
    head += ["faster than greedy", f"sentences/s, {SIZES[-1]} at a time"]
    rows, points = [], []
    for number, one in enumerate(every):
        times = [took[key][number] for key in took]
        folder, count = bench.folder / one.run, sum(p.numel() for p in bench.run(one).model.parameters())
        rows.append([
            one.name, "distilled" if one.distilled else "raw", f"{scores[number]:.2f}", f"{runs.steps(folder):,}",
            f"{runs.minutes(folder):.1f}", f"{count / 1e6:.2f} M", *(f"{value:.1f}" for value in times),
            f"{took[1, 1][0] / took[1, 1][number]:.2f}", f"{1000 / took[cores, SIZES[-1]][number]:.0f}",
        ])  # fmt: skip
        points.append((one.name, one.distilled, took[1, 1][number], scores[number]))
    lines = [
        f"- {results.conditions(given.threads)}",
        f"- {bench.title}, {len(bench.test):,} sentences. Every run has the same number of steps, with the settings "
        "that `regard train` chooses; minutes are those of its training.",
        f"- {metric.get_signature()}",
        f"- Latency: {MEASURED} sentences, {given.rounds} rounds in turn, medians; faster: at one sentence and thread.",
        "",
        *results.table(head, rows),
    ]
    if compared := differences(bench, said):
        lines += ["", "Differences, paired bootstrap of 1,000 samples (95 % interval of the second):", ""]
        lines += results.table(["", "BLEU", "BLEU", "95 %", "p"], compared)
    if given.write:
        name = "decoders.png" if given.pair == "multi30k" else "decoders-tatoeba.png"
        picture(points, Path(__file__).parents[1] / "docs" / name, f"Decoders compared: {bench.title}")
        title = "Decoders that write all tokens at once" + ("" if given.pair == "multi30k" else f": {given.pair}")
        results.write(title, [*lines, "", f"![quality and latency](../docs/{name})"])


if __name__ == "__main__":
    tune()
    main()
