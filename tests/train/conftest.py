"""Something tiny to learn: short sequences of numbers that count upwards."""

import os

import numpy as np
import pytest

import regard
from regard.data import BucketedBatches, ResumableBatches
from regard.parts.objectives.next_token import NextToken
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
    return lambda budget=24, seed=1: ResumableBatches(BucketedBatches(Rows(), budget, seed, START, PAD))


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
