"""What the user asked of a training run, as run.json stores it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Job:
    """Everything that a run depends on, besides the files it reads. Stored in run.json.

    data, source, target, dev, test, columns, bad_lines: as in regard.data.open_corpus.
    longest:       the most tokens of a source or target; 0: what the batch and the positions allow. Longer examples are
                   left out.
    tokenizer:     bpe, wordpiece, unigram, characters, bytes, words, pretokenised, or a tokenizer.json; for source and
                   target apart: "characters,pretokenised".
    vocab:         the vocabulary size of a tokenizer that is trained here.
    metrics:       measured on dev by decoding, besides the loss.
    any_reference: where a source is on several lines, each of its targets counts as right.
    dev_most:      the number of dev examples that are decoded at every evaluation; 0: all.
    threads:       of torch; 0: its default.
    origin:        a run folder to begin from: its model, weights, tokenizer and, if none is named, recipe.
    task:          classify, match or tag: the objective and the head are those of the task, whatever the recipe has.
    header:        yes or no: the first line of a table names its columns, or is an example; None: decided by its words.
    lora:          the rank of LoRA adapters that are trained instead of the model; 0: the model itself is trained.
    teacher:       a run folder whose answers to the training sources are learned instead of the targets.
    as_published:  settings that are not given are those of the recipe, not chosen by the budget and the data.
    """

    recipe: str
    run: str
    size: str | None = None
    overrides: list[str] = field(default_factory=list)
    data: str | None = None
    source: str | None = None
    target: str | None = None
    dev: str | None = None
    test: str | None = None
    columns: str | None = None
    bad_lines: str = "refuse"
    longest: int = 0
    tokenizer: str | None = None
    vocab: int | None = None
    lowercase: bool = False
    metrics: list[str] = field(default_factory=list)
    any_reference: bool = False
    dev_most: int = 500
    device: str = "cpu"
    threads: int = 0
    origin: str | None = None
    task: str | None = None
    lora: int = 0
    header: str | None = None
    as_published: bool = False
    teacher: str | None = None
