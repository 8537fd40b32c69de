"""Choose the settings that `regard train` is not given, from the budget, the size of the data and the model.

There is one rule for each setting. Every choice has a reason; all are printed in one line and kept in run.json.
bench/first.py measures the rules. `--as-published` turns them off.
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

DEFAULT_MINUTES = 10.0  # of a run that is trained from scratch and was given no end
FINE_TUNING_EPOCHS = 3.0  # of a fine-tuning run that was given no end
SAMPLE_SIZE = 500  # records from which the mean length is estimated
FLOPS_PER_SECOND = {"cpu": 1.1e11, "cuda": 1e13, "mps": 1e12}  # per thread on a CPU, else per device
MAX_THREADS = 16  # a small model gets no faster with more
EFFICIENCY = 0.85  # share of FLOPS_PER_SECOND that training reaches, with parameters counted as in gather_facts
MIN_STEPS_PER_EPOCH = 40  # of a bag-of-words classifier; with fewer, it gets more epochs instead
PAIR_EPOCHS = 8  # of a bag-of-words model of text pairs
BAG_OF_WORDS_LR = 0.015  # for fine-tuning a bag-of-words classifier
DROPOUT = ((12, 0.1), (40, 0.2), (math.inf, 0.3))  # (up to this many epochs, dropout)
TEXT_DROPOUT = ((30, 0.1), (100, 0.2), (math.inf, 0.3))  # a language model overfits later: every position is a target
FINE_TUNING_BATCH_SIZE = 16  # sequences
SIZED_TOKENIZERS = ("bpe", "unigram", "wordpiece")  # tokenizers that can be trained to any vocabulary size
TASKS_WITH_NEW_HEAD = ("Labels", "Matches", "Tags")  # tasks whose answers come from a new head
PAIRS = ("Pairs", "ParallelPairs")  # tasks that turn a text into another
MANY_CLASSES = 10  # a new head with more classes gets a higher learning rate
SMALL_DATA = 50_000  # with fewer examples, fine-tuning freezes the embeddings
TOKENIZER_SAMPLE_SIZE = 10_000  # records by which the tokenizer of pairs is chosen
MAX_WORD_LENGTH = 30  # mean number of characters up to which texts count as single words
MAX_SPACED_SHARE = 0.05  # share of texts that may contain a space where texts count as single words
MAX_SYMBOLS = 256  # distinct symbols of a notation that is separated by spaces, such as phonemes
MIN_SYMBOL_COUNT = 20  # mean number of occurrences of such a symbol
LONG_TEXT = 4_000_000  # characters from which on a language model reads subwords instead of characters
# Scripts without spaces between words: Japanese, Chinese, Thai, Lao, Burmese, Khmer.
UNSPACED_SCRIPTS = re.compile("[\u3040-\u30ff\u3400-\u9fff\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]")


class Choice(NamedTuple):
    """A setting that was chosen because the user did not give it."""

    key: str
    value: Any
    why: str = ""

    def __str__(self) -> str:
        name = self.key.rpartition(".")[2]
        value = f"{self.value:,}" if type(self.value) is int else f"{self.value}"
        return f"{name} {value}" + (f" ({self.why})" if self.why else "")


def choose_end(train: dict[str, Any], fine_tuning: bool) -> list[Choice]:
    """Choose minutes or epochs for a run whose [train] table gives no end."""
    if any(train.get(name) for name in ("steps", "minutes", "epochs")):
        return []
    why = "no end was given"
    return [
        Choice("train.epochs", FINE_TUNING_EPOCHS, why)
        if fine_tuning
        else Choice("train.minutes", DEFAULT_MINUTES, why)
    ]


def choose_tokenizer(task: str, whole_words: bool, lines: CorpusSplit) -> list[Choice]:
    """Choose a tokenizer where the task's default does not fit the data.

    A tagger reads WordPiece with a large vocabulary, so that most words are one token. A language model reads BPE where
    the text is long. Pairs of which one side is single words are spelled in characters.

    whole_words: the model's embed takes whole words.
    """
    characters = lines.records.characters
    if whole_words:
        return [Choice("tokenizer", "words", "n-grams of words"), Choice("lowercase", True)]
    if task == "Tags":
        return [Choice("tokenizer", "wordpiece", "tagging"), Choice("vocab", 16000, "most words in one piece")]
    if task == "Text" and characters >= LONG_TEXT:
        return [Choice("tokenizer", "bpe", f"{abbreviate(characters)} characters")]
    if task in PAIRS:
        return choose_spelling_tokenizer(lines)
    return []


def choose_spelling_tokenizer(lines: CorpusSplit) -> list[Choice]:
    """Choose characters for a side of single words, such as spellings, and whole symbols for another side of few
    symbols separated by spaces, such as phonemes. Where neither side is single words, choose nothing."""
    sides = list(zip(*islice(lines, TOKENIZER_SAMPLE_SIZE), strict=True))
    single = [_are_words(texts) for texts in sides]
    if not any(single):
        return []
    if all(single):
        return [Choice("tokenizer", "characters", "single words")]
    kinds = ["characters" if one else _tokenizer_for_other(texts) for one, texts in zip(single, sides, strict=True)]
    words, other = ("sources", "targets") if single[0] else ("targets", "sources")
    few = f", {other} of {len(_symbols(sides[single.index(False)]))} symbols" if "pretokenised" in kinds else ""
    return [Choice("tokenizer", ",".join(kinds), f"{words} are single words{few}")]


def _are_words(texts: Sequence[str]) -> bool:
    """Return whether the texts are short and have no spaces inside, in a script that separates words by spaces."""
    spaced = sum(" " in text.strip() for text in texts)
    characters = sum(map(len, texts))
    unspaced = sum(len(UNSPACED_SCRIPTS.findall(text)) for text in texts)
    return (
        spaced <= MAX_SPACED_SHARE * len(texts)
        and characters <= MAX_WORD_LENGTH * len(texts)
        and unspaced <= characters / 10
    )


def _tokenizer_for_other(texts: Sequence[str]) -> str:
    """Return the tokenizer for texts whose other side is single words."""
    different = len(_symbols(texts))
    return (
        "pretokenised"
        if different <= min(MAX_SYMBOLS, sum(len(text.split()) for text in texts) / MIN_SYMBOL_COUNT)
        else "bpe"
    )


def _symbols(texts: Sequence[str]) -> set[str]:
    return {symbol for text in texts for symbol in text.split()}


def choose_tie(recipe: dict[str, Any]) -> list[Choice]:
    """Untie the source embedding where source and target have different vocabularies."""
    untied = {"all": "target", "source-target": "none"}.get(recipe["model"].get("tie", "none"))
    if untied is None or not isinstance(recipe.get("vocab"), list):
        return []
    return [Choice("model.tie", untied, "two vocabularies")]


def has_vocab_size(kind: str) -> bool:
    """Return whether a tokenizer takes a vocabulary size; of two, whether one does and the other does not mind."""
    kinds = kind.split(",")
    return any(one in SIZED_TOKENIZERS for one in kinds) and all(
        one in (*SIZED_TOKENIZERS, "characters", "bytes") for one in kinds
    )


def choose_vocab(lines: CorpusSplit, columns: Sequence[int]) -> Choice:
    """Choose the vocabulary size of a new tokenizer: one token per 400 characters of text, so that each token is
    frequent enough, and more where the script has thousands of characters."""
    characters = lines.records.characters
    size = 1000 * round(characters / 400_000)
    text = "".join(islice(lines.texts(*columns), SAMPLE_SIZE))
    unspaced = len(UNSPACED_SCRIPTS.findall(text)) > len(text) / 10
    why = f"{abbreviate(characters)} characters" + (", no spaces between words" if unspaced else "")
    return Choice("vocab", min(max(size, 6000 if unspaced else 2000), 32000), why)


class Facts(NamedTuple):
    """The facts about the task, the model and the data that the rules depend on.

    task:        name of the task's class.
    width:       model width.
    parameters:  number of parameters.
    examples:    number of training examples.
    positions:   estimated number of positions in all training examples.
    passes:      estimated number of epochs.
    steps:       estimated steps per epoch.
    classes:     number of classes of a classifier.
    whole_words: the model's embed takes whole words.
    lora:        only LoRA matrices are trained.
    new_head:    the head is initialized anew.
    bounded:     the user gave the steps or the epochs of the run.
    minutes:     time limit of the run; 0: none.
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


def gather_facts(task: Task, model: Model, lines: CorpusSplit, train: dict[str, Any], given: Collection[str]) -> Facts:
    """Return the facts that the rules depend on.

    model: may be without weights, since only its sizes are used.
    given: keys that the user set, such as train.steps.
    """
    parameters = sum(p.numel() for p in model.parameters())
    busy = parameters - sum(p.numel() for p in model.embed.parameters())
    lengths = [task.tokens(row) for row in islice(lines, SAMPLE_SIZE)]
    length = sum(lengths) / max(len(lengths), 1)
    examples = lines.count or lines.records.count
    positions = max(examples * length, 1.0)
    batch = _batch(task, train, parameters, length)
    return Facts(
        type(task).__name__, model.width, parameters, examples, positions,
        passes=_passes(train, positions, batch, EFFICIENCY * flops_per_second(task.job.device) / (6 * max(busy, 1))),
        steps=math.ceil(positions / batch),
        classes=getattr(model.head, "classes", None) or 0,
        whole_words=model.embed.whole_words,
        lora=task.job.lora > 0,
        new_head=task.job.task is not None,
        bounded=any(train.get(name) and f"train.{name}" in given for name in ("steps", "epochs")),
        minutes=train.get("minutes", 0.0),
    )  # fmt: skip


def _batch(task: Task, train: dict[str, Any], parameters: int, length: float) -> float:
    """Return the estimated number of positions in a step. length: mean positions of an example."""
    batch, rows = train.get("batch_tokens", default_batch_tokens(parameters)), train.get("batch_size", 0)
    context = train.get("context_length", 256)
    if task.reads == "text":
        batch = (rows or max(batch // context, 1)) * context
    elif rows:
        batch = min(batch, rows * max(length, 1.0))
    return batch * train.get("gradient_accumulation", 1)


def default_batch_tokens(parameters: int) -> int:
    """Return the number of tokens in a batch for a model of this size."""
    return 2048 if parameters < 2e7 else 4096


def _passes(train: dict[str, Any], positions: float, batch: float, speed: float) -> float:
    """Return the estimated number of epochs. It depends on the speed, in positions per second, only where minutes are
    the run's only bound."""
    bounds = []
    if train.get("epochs"):
        bounds.append(float(train["epochs"]))
    if train.get("steps"):
        bounds.append(train["steps"] * batch / positions)
    if train.get("minutes") and not bounds:
        bounds.append(60 * train["minutes"] * speed / positions)
    return min(bounds, default=1.0)


def flops_per_second(device: str) -> float:
    """Return a rough estimate of a device's matrix-product throughput. Nothing is measured, so that the same command
    makes the same choices on a busy machine."""
    kind = device.partition(":")[0]
    return FLOPS_PER_SECOND.get(kind, FLOPS_PER_SECOND["mps"]) * (
        min(torch.get_num_threads(), MAX_THREADS) if kind == "cpu" else 1
    )


def choose_from_scratch(facts: Facts) -> Iterator[Choice]:
    """Choose Muon, whose updates have the same size for every matrix, with a learning rate that falls linearly to 0 at
    the end of the budget. Warmup never takes more than half of a run (schedule.py)."""
    if facts.whole_words:  # such a recipe brings its other settings
        yield from choose_bag_of_words_epochs(facts)
        return
    yield Choice("train.optimizer", "muon", "matrices; AdamW the rest")
    yield Choice("train.lr", round(0.004 * min(1.0, (128 / facts.width) ** 0.5), 4), f"width {facts.width}")
    yield Choice("train.schedule", "linear", "to 0 at the end of the budget")
    yield Choice("train.warmup", 50)
    yield Choice(
        "train.batch_tokens", default_batch_tokens(facts.parameters), f"{abbreviate(facts.parameters)} parameters"
    )
    yield Choice("train.weight_decay", 0.1)
    if facts.task in PAIRS:
        yield Choice("train.label_smoothing", 0.1, "translation")
    rate = next(rate for limit, rate in (TEXT_DROPOUT if facts.task == "Text" else DROPOUT) if facts.passes <= limit)
    yield Choice("model.dropout", rate, f"about {facts.passes:.2g} passes over {abbreviate(facts.examples)} examples")


def choose_bag_of_words_epochs(facts: Facts) -> Iterator[Choice]:
    """Choose the epochs of a bag-of-words classifier: the more labels, the more epochs, and at least
    MIN_STEPS_PER_EPOCH steps for each. Text pairs get PAIR_EPOCHS. Steps or epochs that the user gave are kept."""
    if facts.bounded:
        return
    pairs = facts.task == "Matches"
    passes = PAIR_EPOCHS if pairs else round(1 + 2 * math.log2(max(facts.classes, 2)))
    steps = MIN_STEPS_PER_EPOCH * passes
    what = "pairs of texts" if pairs else f"{facts.classes} labels"
    why = f"{what}; more would overfit"
    if facts.steps < MIN_STEPS_PER_EPOCH:
        passes = math.ceil(steps / facts.steps)
        texts = f"{abbreviate(facts.examples)} {'pairs' if pairs else 'texts'}"
        why = f"{what} want {steps} steps, and {texts} have about {facts.steps} an epoch"
    if facts.minutes:
        why += f"; the run ends after {passes} epochs, even if its {facts.minutes:g} minutes are not over"
    yield Choice("train.epochs", float(passes), why)


def choose_for_fine_tuning(facts: Facts) -> Iterator[Choice]:
    """Choose the settings of a pretrained model that answers in labels or numbers. A generative model keeps the default
    fine-tuning settings: its embedding may be tied to its head."""
    if facts.task not in TASKS_WITH_NEW_HEAD:
        return
    if facts.whole_words:
        yield from choose_bag_of_words_epochs(facts)
    if not facts.lora:
        lr = BAG_OF_WORDS_LR if facts.whole_words else round(5e-5 * min(768 / facts.width, 4.0), 6)
        yield Choice("train.lr", lr, "word vectors" if facts.whole_words else f"width {facts.width}")
    if facts.new_head and not facts.whole_words:
        yield from choose_for_new_head(facts)


def choose_for_new_head(facts: Facts) -> Iterator[Choice]:
    """Choose small batches, because a few epochs over little data have few steps, and freeze the embeddings, which are
    trained already."""
    yield Choice("train.batch_size", FINE_TUNING_BATCH_SIZE)
    if facts.classes > MANY_CLASSES:
        yield Choice("train.head_lr", 5.0, f"{facts.classes} labels")
    if not facts.lora and facts.examples < SMALL_DATA:
        yield Choice("train.freeze", "embed", f"{abbreviate(facts.examples)} examples")
    yield Choice(
        "train.eval_steps", max(math.ceil(facts.examples / FINE_TUNING_BATCH_SIZE / 2), 1), "twice in each pass"
    )


def describe(choices: Sequence[Choice], as_published: bool) -> str:
    """Return a sentence that lists the choices, with a hint at --as-published where that was not given."""
    hint = "" if as_published else "; --as-published for the recipe's own settings"
    return f"chosen: {', '.join(map(str, choices))}{hint}"


def abbreviate(number: float) -> str:
    """Return a number in at most three digits: 1234567 -> "1.23M"."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"
