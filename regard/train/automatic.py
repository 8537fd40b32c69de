"""What `regard train` chooses where nothing is said: one rule for each setting, from the budget, the size of the data
and the model. Every choice has its reason; all are printed in one line and kept in run.json.

bench/first.py measures them. `--as-published` leaves them out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from regard.core import Model
from regard.data import CorpusSplit
from regard.tasks import Task

MINUTES = 10.0  # of a run whose end nobody gave
EPOCHS = 3.0  # of one that begins from another run
SAMPLE = 500  # records, from which the length of the others is estimated
SPEED = {"cpu": 1.1e11, "cuda": 1e13, "mps": 1e12}  # operations a second, of each thread or of the device
THREADS = 16  # that make a small model faster, at the most
EFFICIENCY = 0.85  # of matrix products that training reaches, about, with parameters counted as below
LEAST_STEPS = 40  # for each pass over many texts, of a classifier of whole words; over few texts, more passes have them
PAIR_EPOCHS = 8  # passes over pairs of texts, each the sum of its words
WORDS_LR = 0.015  # of such a classifier that goes on
DROPOUT = ((12, 0.1), (40, 0.2), (math.inf, 0.3))  # up to so many passes over the data
TEXT_DROPOUT = ((30, 0.1), (100, 0.2), (math.inf, 0.3))  # a language model overfits later: every position is a target
ROWS = 16  # sequences of a batch in fine-tuning
SIZED = ("bpe", "unigram", "wordpiece")  # tokenizers that are learned in any size
READERS = ("Labels", "Matches", "Tags")  # tasks that are answered by a new head
MANY = 10  # labels, from which on a new head has much to learn
LITTLE = 50_000  # examples, up to which words keep their vectors in fine-tuning
LOOKED = 10_000  # records, by which the tokenizer of pairs is chosen
WORD = 30  # characters of a text that is a single word, at the most and in the mean
RARELY = 0.05  # the share of texts with a space inside, where texts are single words
SYMBOLS = 256  # different symbols, at the most, of a notation with spaces between them
OFTEN = 20  # times that each of them stands there, at the least and in the mean
LONG_TEXT = 4_000_000  # characters, from which on a language model reads pieces of words
UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u9fff\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]")  # no spaces between words


class Choice(NamedTuple):
    """A setting that nobody gave."""

    key: str
    value: Any
    why: str = ""

    def __str__(self) -> str:
        name = self.key.rpartition(".")[2]
        value = f"{self.value:,}" if type(self.value) is int else f"{self.value}"
        return f"{name} {value}" + (f" ({self.why})" if self.why else "")


def end(train: dict[str, Any], fine_tuning: bool) -> list[Choice]:
    """When to stop. `train` is what is known of the recipe's [train]."""
    if any(train.get(name) for name in ("steps", "minutes", "epochs")):
        return []
    why = "no end was given"
    return [Choice("train.epochs", EPOCHS, why) if fine_tuning else Choice("train.minutes", MINUTES, why)]


def tokenizer(task: str, whole_words: bool, lines: CorpusSplit) -> list[Choice]:
    """Pieces of words, but for a tagger whole words where they are frequent enough. A language model reads the
    characters of a short text. What answers single words, or is answered by them, spells them.

    whole_words: the model's embed wants them.
    """
    characters = lines.records.characters
    if whole_words:
        return [Choice("tokenizer", "words", "n-grams of words"), Choice("lowercase", True)]
    if task == "Tags":
        return [Choice("tokenizer", "wordpiece", "tagging"), Choice("vocab", 16000, "most words in one piece")]
    if task == "Text" and characters >= LONG_TEXT:
        return [Choice("tokenizer", "bpe", f"{short(characters)} characters")]
    if task == "Pairs":
        return spelling(lines)
    return []


def spelling(lines: CorpusSplit) -> list[Choice]:
    """Characters for a side of single words, such as spellings; beside them, whole symbols for a side of few different
    ones with spaces between, such as phonemes. Nothing is chosen where neither side is of single words."""
    sides = list(zip(*islice(lines, LOOKED), strict=True))
    single = [_are_words(texts) for texts in sides]
    if not any(single):
        return []
    if all(single):
        return [Choice("tokenizer", "characters", "single words")]
    kinds = ["characters" if one else _beside_words(texts) for one, texts in zip(single, sides, strict=True)]
    words, other = ("sources", "targets") if single[0] else ("targets", "sources")
    few = f", {other} of {len(_symbols(sides[single.index(False)]))} symbols" if "pretokenised" in kinds else ""
    return [Choice("tokenizer", ",".join(kinds), f"{words} are single words{few}")]


def _are_words(texts: Sequence[str]) -> bool:
    """Return whether these are short and have no spaces inside, in a script that has spaces between words."""
    spaced = sum(" " in text.strip() for text in texts)
    characters = sum(map(len, texts))
    unspaced = sum(len(UNSPACED.findall(text)) for text in texts)
    return spaced <= RARELY * len(texts) and characters <= WORD * len(texts) and unspaced <= characters / 10


def _beside_words(texts: Sequence[str]) -> str:
    """Return the tokenizer for the other side of single words."""
    different = len(_symbols(texts))
    return "pretokenised" if different <= min(SYMBOLS, sum(len(text.split()) for text in texts) / OFTEN) else "bpe"


def _symbols(texts: Sequence[str]) -> set[str]:
    return {symbol for text in texts for symbol in text.split()}


def tie(recipe: dict[str, Any]) -> list[Choice]:
    """What a model ties that cannot tie its two sides, since each has a vocabulary of its own."""
    untied = {"all": "target", "source-target": "none"}.get(recipe["model"].get("tie", "none"))
    if untied is None or not isinstance(recipe.get("vocab"), list):
        return []
    return [Choice("model.tie", untied, "two vocabularies")]


def is_sized(kind: str) -> bool:
    """Return whether a tokenizer, or one of two, is learned in any size, which does not matter to the other."""
    kinds = kind.split(",")
    return any(one in SIZED for one in kinds) and all(one in (*SIZED, "characters", "bytes") for one in kinds)


def vocabulary(lines: CorpusSplit, columns: Sequence[int]) -> Choice:
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
    steps:      of a pass, about.
    classes:    of a classifier.
    whole_words: the model's embed wants them.
    lora:       only small maps learn.
    new_head:   the head begins afresh, whatever the rest begins from.
    bounded:    the steps or the epochs of the run were given.
    minutes:    of the run at the most; 0: any number.
    """

    task: str
    width: int
    parameters: int
    examples: int
    positions: float
    passes: float
    steps: int = 1
    classes: int = 0
    whole_words: bool = False
    lora: bool = False
    new_head: bool = False
    bounded: bool = False
    minutes: float = 0.0


def facts(task: Task, model: Model, lines: CorpusSplit, train: dict[str, Any], given: Collection[str]) -> Facts:
    """Return what the rules go by.

    model: without weights, since its sizes are all that counts.
    given: settings that were said, such as train.steps.
    """
    parameters = sum(p.numel() for p in model.parameters())
    busy = parameters - sum(p.numel() for p in model.embed.parameters())
    lengths = [task.tokens(row) for row in islice(lines, SAMPLE)]
    length = sum(lengths) / max(len(lengths), 1)
    examples = lines.count or lines.records.count
    positions = max(examples * length, 1.0)
    batch = _batch(task, train, parameters, length)
    return Facts(
        type(task).__name__, model.width, parameters, examples, positions,
        passes=_passes(train, positions, batch, EFFICIENCY * speed(task.job.device) / (6 * max(busy, 1))),
        steps=math.ceil(positions / batch),
        classes=getattr(model.head, "classes", None) or 0,
        whole_words=model.embed.whole_words,
        lora=task.job.lora > 0,
        new_head=task.job.task is not None,
        bounded=any(train.get(name) and f"train.{name}" in given for name in ("steps", "epochs")),
        minutes=train.get("minutes", 0.0),
    )  # fmt: skip


def _batch(task: Task, train: dict[str, Any], parameters: int, length: float) -> float:
    """Return the positions of a step, about. length: of an example."""
    batch, rows = train.get("batch_tokens", batch_of(parameters)), train.get("batch_size", 0)
    context = train.get("context_length", 256)
    if task.reads == "text":
        batch = (rows or max(batch // context, 1)) * context
    elif rows:
        batch = min(batch, rows * max(length, 1.0))
    return batch * train.get("gradient_accumulation", 1)


def batch_of(parameters: int) -> int:
    """Return the tokens of a batch for a model of this size."""
    return 2048 if parameters < 2e7 else 4096


def _passes(train: dict[str, Any], positions: float, batch: float, speed: float) -> float:
    """Return how often the data is gone through, about. Only where nothing but minutes bounds the run, it depends on
    the speed, in positions a second."""
    bounds = []
    if train.get("epochs"):
        bounds.append(float(train["epochs"]))
    if train.get("steps"):
        bounds.append(train["steps"] * batch / positions)
    if train.get("minutes") and not bounds:
        bounds.append(60 * train["minutes"] * speed / positions)
    return min(bounds, default=1.0)


def speed(device: str) -> float:
    """Return the floating-point operations of matrix products that a device makes in a second, roughly. Nothing is
    measured, so that the same command chooses the same on a machine that is busy."""
    kind = device.partition(":")[0]
    return SPEED.get(kind, SPEED["mps"]) * (min(torch.get_num_threads(), THREADS) if kind == "cpu" else 1)


def from_scratch(known: Facts) -> Iterator[Choice]:
    """Muon, whose steps have one size for every matrix, at a rate that falls to nothing when the budget ends. A warm-up
    never takes more than half of a run, whatever is asked (schedule.py)."""
    if known.whole_words:  # the recipe says the rest
        yield from epochs_of_words(known)
        return
    yield Choice("train.optimizer", "muon", "matrices; AdamW the rest")
    yield Choice("train.lr", round(0.004 * min(1.0, (128 / known.width) ** 0.5), 4), f"width {known.width}")
    yield Choice("train.schedule", "linear", "to 0 at the end of the budget")
    yield Choice("train.warmup", 50)
    yield Choice("train.batch_tokens", batch_of(known.parameters), f"{short(known.parameters)} parameters")
    yield Choice("train.weight_decay", 0.1)
    if known.task == "Pairs":
        yield Choice("train.label_smoothing", 0.1, "translation")
    rate = next(rate for most, rate in (TEXT_DROPOUT if known.task == "Text" else DROPOUT) if known.passes <= most)
    yield Choice("model.dropout", rate, f"about {known.passes:.2g} passes over {short(known.examples)} examples")


def epochs_of_words(known: Facts) -> Iterator[Choice]:
    """The more labels, the more passes; and the fewer texts, since what counts then is the number of steps. Pairs of
    texts have a number of their own. An end that was given in steps or epochs is the end."""
    if known.bounded:
        return
    pairs = known.task == "Matches"
    passes = PAIR_EPOCHS if pairs else round(1 + 2 * math.log2(max(known.classes, 2)))
    steps = LEAST_STEPS * passes
    what = "pairs of texts" if pairs else f"{known.classes} labels"
    why = f"{what}; more would be learned by heart"
    if known.steps < LEAST_STEPS:
        passes = math.ceil(steps / known.steps)
        texts = f"{short(known.examples)} {'pairs' if pairs else 'texts'}"
        why = f"{what} want {steps} steps, and {texts} have about {known.steps} an epoch"
    if known.minutes:
        why += f"; the run ends after {passes} epochs, even if its {known.minutes:g} minutes are not over"
    yield Choice("train.epochs", float(passes), why)


def fine_tuning(known: Facts) -> Iterator[Choice]:
    """Return what is chosen for a model that was trained before, and answers in labels or numbers. One that goes on
    writing keeps the settings of fine-tuning as they are: its embeddings may be its head, too."""
    if known.task not in READERS:
        return
    if known.whole_words:
        yield from epochs_of_words(known)
    if not known.lora:
        lr = WORDS_LR if known.whole_words else round(5e-5 * min(768 / known.width, 4.0), 6)
        yield Choice("train.lr", lr, "word vectors" if known.whole_words else f"width {known.width}")
    if known.new_head and not known.whole_words:
        yield from new_head(known)


def new_head(known: Facts) -> Iterator[Choice]:
    """Small batches, since there are few steps in a few passes over little data; and what every word means is known."""
    yield Choice("train.batch_size", ROWS)
    if known.classes > MANY:
        yield Choice("train.head_lr", 5.0, f"{known.classes} labels")
    if not known.lora and known.examples < LITTLE:
        yield Choice("train.freeze", "embed", f"{short(known.examples)} examples")
    yield Choice("train.eval_steps", max(math.ceil(known.examples / ROWS / 2), 1), "twice in each pass")


def sentence(choices: Sequence[Choice], as_published: bool) -> str:
    """Return what was chosen; with --as-published, which a person knows of then, little is."""
    hint = "" if as_published else "; --as-published for the recipe's own settings"
    return f"chosen: {', '.join(map(str, choices))}{hint}"


def short(number: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"
