"""Something tiny to learn: words of seven letters at most, spelled out in capitals."""

import os
import random

import numpy as np
import pytest

import regard
from regard.data import Bucketed, Feed
from regard.parts.objectives.next_token import NextToken
from regard.runs.job import Job
from regard.runs.settings import Settings
from regard.train.loop import Trainer

START, END, PAD = 1, 2, 0
VOCAB = 13

DECODER = {
    "vocab": VOCAB,
    "model": {
        "kind": "decoder",
        "width": 6,
        "heads": 2,
        "depth": 1,
        "dropout": 0.2,
        "tie": "target",
        "embed": {"part": "tokens", "position": "sinusoidal"},
        "layer": [{"mixer": {"part": "attention", "pattern": "causal"}, "feedforward": {"part": "mlp", "hidden": 10}}],
    },
}
TINY = ["model.width=8", "model.depth=1", "model.heads=2", "model.tie=target", "model.dropout=0.2"]
TINY += [f"model.{side}.layer.0.feedforward.hidden=12" for side in ("encoder", "decoder")]


class Rows:
    """Short sequences that count upwards."""

    def __init__(self, count=40, seed=0):
        rng = np.random.default_rng(seed)
        self.rows = []
        for _ in range(count):
            first, length = rng.integers(3, 7), rng.integers(2, 7)
            self.rows.append((np.array([*range(first, first + length), END], np.int32),))
        self.lengths = np.array([[len(row[0])] for row in self.rows])

    def __getitem__(self, index):
        return self.rows[index]


@pytest.fixture(autouse=True)
def _no_waiting_for_disks(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def feed():
    """A feed of them, about ten batches an epoch."""
    return lambda budget=24, seed=1: Feed(Bucketed(Rows(), budget, seed, START, PAD))


@pytest.fixture
def model():
    import torch

    def make(seed=0, recipe=DECODER, **changes):
        torch.manual_seed(seed)
        return regard.build({**recipe, "model": recipe["model"] | changes})

    return make


@pytest.fixture
def trainer(model, feed):
    """A trainer of such a model; what is not a setting goes to the trainer itself."""

    def make(run=None, **given):
        own = {key: given.pop(key) for key in list(given) if key not in Settings.__dataclass_fields__}
        settings = Settings(**{"lr": 0.01, "warmup": 1, "steps": 12, **given})
        parts = {"model": model(), "objective": NextToken(settings.label_smoothing), "feed": feed(), **own}
        return Trainer(**parts, settings=settings, run=run)

    return make


@pytest.fixture
def pairs(tmp_path):
    """A file of them."""
    rng = random.Random(0)
    words = sorted({"".join(rng.choices("abcdefg", k=rng.randint(1, 7))) for _ in range(130)})
    path = tmp_path / "words.tsv"
    path.write_text("source\ttarget\n" + "".join(f"{w}\t{' '.join(w.upper())}\n" for w in words))
    return path


@pytest.fixture
def job(pairs, tmp_path):
    """A job over them; settings of [train] by name."""

    def make(run="run", job=None, **train):
        settings = {"steps": 12, "batch_tokens": 80, "warmup": 1, "lr": 0.01, **train}
        overrides = [*TINY, *(f"train.{key}={value}" for key, value in settings.items())]
        given = {"data": str(pairs), "dev": "0.2", "test": "0", "tokenizer": "characters,pretokenised"}
        given |= {"recipe": "transformer", "size": "tiny", "overrides": overrides, "run": str(tmp_path / run)}
        return Job(**(given | (job or {})), as_published=True)

    return make
