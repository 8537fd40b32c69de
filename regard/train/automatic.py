"""What `regard train` chooses where nothing is said: one rule for each setting, from the budget, the size of the data
and the model. Every choice has its reason; all are printed in one line and kept in run.json.

bench/first.py measures them. `--as-published` leaves them out.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from regard.core import Model
from regard.data import Lines, Tokenizer

MINUTES = 10.0  # of a run whose end nobody gave
EPOCHS = 3.0  # of one that begins from another run
SAMPLE = 500  # records, from which the length of the others is estimated
EFFICIENCY = 0.85  # of matrix products that training reaches, about, with parameters counted as below
DROPOUT = ((12, 0.1), (40, 0.2), (math.inf, 0.3))  # up to so many passes over the data
ROWS = 16  # sequences of a batch in fine-tuning
SIZED = ("bpe", "unigram", "wordpiece")  # tokenizers that are learned in any size
READERS = ("Labels", "Matches", "Tags")  # tasks that are answered by a new head
MANY = 10  # labels, from which on a new head has much to learn
LITTLE = 50_000  # examples, up to which words keep their vectors in fine-tuning
LONG_TEXT = 4_000_000  # characters, from which on a language model reads pieces of words
UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u9fff\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]")  # no spaces between words


class Choice(NamedTuple):
    """A setting that nobody gave."""

    key: str
    value: Any
    why: str = ""

    def __str__(self) -> str:
        name = self.key.rpartition(".")[2]
        value = f"{self.value:,}" if isinstance(self.value, int) else f"{self.value}"
        return f"{name} {value}" + (f" ({self.why})" if self.why else "")


def end(train: dict[str, Any], fine_tuning: bool) -> list[Choice]:
    """When to stop. `train` is what is known of the recipe's [train]."""
    if any(train.get(name) for name in ("steps", "minutes", "epochs")):
        return []
    why = "no end was given"
    return [Choice("train.epochs", EPOCHS, why) if fine_tuning else Choice("train.minutes", MINUTES, why)]


def tokenizer(task: str, whole_words: bool, lines: Lines) -> list[Choice]:
    """Pieces of words, but for a tagger whole words where they are frequent enough. A language model reads the
    characters of a short text.

    whole_words: the model's embed wants them.
    """
    characters = lines.records.characters
    if whole_words:
        return [Choice("tokenizer", "words", "n-grams of words"), Choice("lowercase", True)]
    if task == "Tags":
        return [Choice("tokenizer", "wordpiece", "tagging"), Choice("vocab", 16000, "most words in one piece")]
    if task == "Text" and characters >= LONG_TEXT:
        return [Choice("tokenizer", "bpe", f"{short(characters)} characters")]
    return []


def vocabulary(lines: Lines, columns: Sequence[int]) -> Choice:
    """The size of a tokenizer that is learned here: about one token for 400 characters of text, so that each is met
    often enough; more where the script has thousands of characters."""
    characters = lines.records.characters
    size = 1000 * round(characters / 400_000)
    text = "".join(islice(lines.texts(*columns), SAMPLE))
    unspaced = len(UNSPACED.findall(text)) > len(text) / 10
    why = f"{short(characters)} characters" + (", no spaces between words" if unspaced else "")
    return Choice("vocab", min(max(size, 6000 if unspaced else 2000), 32000), why)


class Facts(NamedTuple):
    """What the rules go by.

    task:       the name of its class.
    width, parameters: of the model.
    examples:   of the training data, and positions: of all of them, about.
    passes:     over the data, about.
    classes:    of a classifier.
    whole_words: the model's embed wants them.
    lora:       only small maps learn.
    """

    task: str
    width: int
    parameters: int
    examples: int
    positions: float
    passes: float
    classes: int = 0
    whole_words: bool = False
    lora: bool = False


def facts(task: str, model: Model, lines: Lines, tokenizers: Sequence[Tokenizer], train: dict[str, Any]) -> Facts:
    """model: without weights, since its sizes are all that counts."""
    parameters = sum(p.numel() for p in model.parameters())
    busy = parameters - sum(p.numel() for p in model.embed.parameters())
    rows = [row[: len(tokenizers)] for row in islice(lines, SAMPLE)]
    lengths = [sum(len(one.encode([text])[0]) for one, text in zip(tokenizers, row, strict=False)) for row in rows]
    examples = lines.count or lines.records.count
    positions = examples * sum(lengths) / max(len(lengths), 1)
    passes = _passes(train, positions, busy)
    classes = getattr(model.head, "classes", 0)
    return Facts(task, model.width, parameters, examples, positions, passes, classes, model.embed.whole_words)


def _passes(train: dict[str, Any], positions: float, busy: int) -> float:
    bounds = []
    if train.get("epochs"):
        bounds.append(float(train["epochs"]))
    if train.get("steps"):
        bounds.append(train["steps"] * train.get("batch", 2048) / max(positions, 1))
    if train.get("minutes"):
        speed = EFFICIENCY * products_per_second() / (6 * max(busy, 1))
        bounds.append(60 * train["minutes"] * speed / max(positions, 1))
    return min(bounds, default=1.0)


def products_per_second() -> float:
    """Floating-point operations of matrix products that this machine makes in a second."""
    one = torch.full((512, 512), 0.5)  # nothing random: the state of the generators is for the model
    best = math.inf
    for _ in range(5):
        begun = time.perf_counter()
        one @ one
        best = min(best, time.perf_counter() - begun)
    return 2 * 512**3 / best


def from_scratch(known: Facts) -> Iterator[Choice]:
    """Muon, whose steps have one size for every matrix, at a rate that falls to nothing when the budget ends. A warm-up
    never takes more than half of a run, whatever is asked (schedule.py)."""
    if known.whole_words:  # the recipe says the rest
        passes = round(1 + 2 * math.log2(max(known.classes, 2)))
        yield Choice("train.epochs", float(passes), f"{known.classes} labels; more would be learned by heart")
        return
    small = known.parameters < 2e7
    yield Choice("train.optimiser", "muon", "matrices; AdamW the rest")
    yield Choice("train.lr", round(0.004 * min(1.0, (128 / known.width) ** 0.5), 4), f"width {known.width}")
    yield Choice("train.schedule", "linear", "to 0 at the end of the budget")
    yield Choice("train.warmup", 50)
    yield Choice("train.batch", 2048 if small else 4096, f"{short(known.parameters)} parameters")
    yield Choice("train.weight_decay", 0.1)
    if known.task == "Pairs":
        yield Choice("train.smoothing", 0.1, "translation")
    rate = next(rate for most, rate in DROPOUT if known.passes <= most)
    yield Choice("model.dropout", rate, f"about {known.passes:.2g} passes over {short(known.examples)} examples")


def fine_tuning(known: Facts) -> Iterator[Choice]:
    """Small batches, since there are few steps in a few passes over little data; and what every word means is known.
    A model that goes on writing keeps the settings of fine-tuning as they are: its embeddings may be its head, too."""
    if known.task not in READERS:
        return
    yield Choice("train.rows", ROWS)
    if known.classes > MANY:
        yield Choice("train.head_lr", 5.0, f"{known.classes} labels")
    if not known.lora:
        yield Choice("train.lr", round(5e-5 * min(768 / known.width, 4.0), 6), f"width {known.width}")
    if not known.lora and known.examples < LITTLE:
        yield Choice("train.freeze", "embed", f"{short(known.examples)} examples")
    yield Choice("train.evaluate", max(math.ceil(known.examples / ROWS / 2), 1), "twice in each pass")


def sentence(choices: Sequence[Choice]) -> str:
    return f"chosen: {', '.join(map(str, choices))}; --as-published for the recipe's own settings"


def short(number: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"
