"""Speed of translation: sentences per second by beam search, compared with others with the same weights.

    python bench/translate.py --run runs/multi30k --write          ten minutes on two cores

The run is that of bench/multi30k.py; where there is none, a quick one is trained for twelve minutes first. Hugging
Face's Marian and CTranslate2 get its weights by `regard convert` and `regard export`; the answers are compared by BLEU.
Contenders take turns.
Needs: pip install -c constraints.txt -e .[bench]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import sacrebleu
import torch

import multi30k
import results
import runs
from race import Contender, race, ratios, speeds
from regard import build, restore
from regard.convert import convert
from regard.export import export
from regard.files import recipe as recipes
from regard.machine import tune
from regard.metrics import join_subwords
from regard.runs.folder import save_derived
from regard.tasks.load import load


def sources(run: Path, count: int) -> dict:
    """Return the sources as all contenders read them."""
    texts = runs.lines_of(multi30k.pieces() / "test.2016.en.gz")[:count]
    read = load(run).source
    vocabulary = read.inner.get_vocab()
    return {
        "texts": texts, "tokens": [text.split() for text in texts],
        "ids": read.encode_with_special_tokens(texts), "pad": read.pad,
        "names": {number: name for name, number in vocabulary.items()}, "marks": [read.pad, read.start, read.end],
    }  # fmt: skip


def as_marian(run: Path, folder: Path) -> None:
    """Write the same model for Hugging Face, whose sinusoids have another order of channels, which all weights follow.
    It also has a bias over the vocabulary, here of zeros."""
    old = restore(run)
    sets = [f"model.{side}.layer.0.feedforward.activation=relu" for side in ("encoder", "decoder")]
    recipe = recipes.load("marian", "tiny", sets) | {"vocab": old.vocab}
    new = build(recipe)
    order = torch.cat((torch.arange(0, old.width, 2), torch.arange(1, old.width, 2)))
    moved = {}
    for name, tensor in old.state_dict().items():
        reads = name.endswith((".q.weight", ".k.weight", ".v.weight", ".into.weight", ".table"))
        writes = ".norms." in name or name.endswith((".out.weight", ".out.bias"))
        moved[name] = tensor[:, order] if reads else tensor[order] if writes else tensor
    new.load_state_dict(moved | {"head.bias": torch.zeros(old.vocab)})
    save_derived(new, run, folder / "as-marian")
    convert(folder / "as-marian", folder / "marian", to="marian")


def bleu(answers: list[str], count: int) -> float:
    references = [join_subwords(line) for line in runs.lines_of(multi30k.pieces() / "test.2016.de.gz")[:count]]
    return sacrebleu.corpus_bleu(
        [join_subwords(line) for line in answers], [references], tokenize="none", force=True
    ).score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, default=Path("runs/multi30k"))
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--count", type=int, default=1000, help="sentences")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="put the result into bench/RESULTS.md")
    given = parser.parse_args()
    threads = given.threads or torch.get_num_threads()
    multi30k.quick(given.run, threads)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "sources.json"
        file.write_text(json.dumps(sources(given.run, given.count)))
        as_marian(given.run, Path(folder))
        export(given.run, Path(folder) / "ct2", "ctranslate2")
        shared = (str(file), str(given.beam), str(threads))
        subprocess.run([*runs.REGARD, "shortlist", str(given.run), "--data", str(multi30k.pieces())], check=True)
        ours, theirs, fast = str(given.run), str(Path(folder) / "marian"), str(Path(folder) / "ct2")
        made = [
            Contender("regard", "translate.py", "ours", ours, *shared, threads=threads),
            Contender(
                "regard, early stopping heuristic",
                "translate.py",
                "ours",
                ours,
                *shared,
                "stop=heuristic",
                threads=threads,
            ),
            Contender("regard, int8", "translate.py", "ours", ours, *shared, "int8", threads=threads),
            Contender("regard, shortlist", "translate.py", "ours", ours, *shared, "shortlist", threads=threads),
            Contender("CTranslate2", "translate.py", "ctranslate2", fast, *shared, threads=threads),
            Contender("CTranslate2, a batch per core", "translate.py", "ctranslate2", fast, *shared, "each", threads=1),
            Contender("CTranslate2, int8", "translate.py", "ctranslate2", fast, *shared, "int8", threads=threads),
            Contender("Hugging Face", "translate.py", "hugging", theirs, *shared, threads=threads),
        ]
        race(made, given.rounds)
        rows = []
        for one in made:
            speed = sorted(speeds(one, "sentences"))
            score = bleu(one.ask("answers")["answers"], given.count)
            rows.append([one.name, f"{speed[len(speed) // 2]:,.0f}", ratios(made[0], one, "sentences"),
                         f"{one.rounds[-1]['peak']:,.0f}", f"{score:.2f}"])  # fmt: skip
            one.end()
    head = ["", "sentences/s", "regard is faster by", "peak MiB", "BLEU"]
    lines = [
        f"- {results.conditions(threads)}",
        f"- Multi30k test 2016, {given.count} sentences, beam {given.beam}, {given.rounds} rounds in turn; medians, "
        "and from the least to the most. Hugging Face and CTranslate2 in batches of 64, sorted by length.",
        "",
        *results.table(head, rows),
    ]
    if given.write:
        results.write("Speed of translation", lines)


if __name__ == "__main__":
    tune()
    main()
