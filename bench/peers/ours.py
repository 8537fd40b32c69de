"""regard's training steps as `regard train` takes them, on the batches of a file.

ours.py RUN BATCHES.json pairs|text|masked

The file may name an optimizer, a learning rate, a warmup, the steps until the learning rate is 0, and a label
smoothing.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from regard import restore, save
from regard.data.batches import IGNORE, Batch, ResumableBatches, teacher_forced
from regard.machine import tune
from regard.parts.objectives.masked import Masked
from regard.parts.objectives.next_token import NextToken
from regard.runs.settings import Settings
from regard.train.learner import Learner
from regard.train.schedule import factor
from worker import Held, serve

tune()
folder, file, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
told = json.loads(Path(file).read_text())


class Fixed:
    """The batches of the file, in their order."""

    def epoch(self, number: int) -> list[int]:
        return list(range(len(told["batches"])))

    def make(self, number: int) -> Batch:
        batch = told["batches"][number]
        if kind == "pairs":
            rows = zip(batch["source"], batch["target"], strict=True)
            return teacher_forced([tuple(map(np.array, row)) for row in rows], told["start"], told["pad"])
        tokens = torch.tensor(batch["tokens"])
        if kind == "text":
            return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), count=tokens[:, 1:].numel())
        targets = torch.tensor(batch["targets"])
        valid = tokens != told["pad"]
        return Batch(tokens, targets, None if bool(valid.all()) else valid, count=int((targets != IGNORE).sum()))


model = restore(folder)
objective = Masked() if kind == "masked" else NextToken(told.get("smoothing", 0.0))
warmup, clip = told.get("warmup", 0), told.get("clip", 1.0)
by = told.get("optimizer", "adamw")
settings = Settings(lr=told.get("lr", 1e-4), optimizer=by, schedule="constant", warmup=0, max_grad_norm=clip, eps=1e-8)
learner = Learner(model, objective, ResumableBatches(Fixed()), settings)  # type: ignore[arg-type]


def loss() -> dict:
    model.eval()
    batch = Fixed().make(0)
    with torch.no_grad():
        return {"loss": float(objective(model, batch).nll) / batch.count}


def rate() -> float:
    return settings.lr * factor("linear", learner.step, warmup, learner.step / told["steps"]) if warmup else settings.lr


def keep(folder: str) -> dict:
    save(model, folder)
    return {}


def go(steps: str) -> dict:
    before = learner.tokens
    for _ in range(int(steps)):
        assert learner.advance(rate)
    return {"tokens": learner.tokens - before, "loss": learner.loss, "peak": held.after()}


held = Held()
serve(go, loss=loss, keep=keep)
