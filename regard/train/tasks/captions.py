"""Pictures with a text each: two towers."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.core import Towers, UserError
from regard.data import Tokenizer, once
from regard.data.batches import Batch, pad_rows
from regard.data.images import Lens, usual
from regard.data.pictures import Pictures, Seen, Shown, open_pictures, prepare_pictures
from regard.parts.objectives.contrastive import Contrastive
from regard.parts.objectives.objective import Objective
from regard.use.towers import AMONG, Pairer, measured

from .task import Say, Task, Tick, silent, unseen

NUMBER = 24  # bits of a picture's number; the hash of its text stands above them


class Captioned:
    """Batches of pictures, and of the texts that `rows` number."""

    def __init__(self, seen: Seen, rows: list[list[int]], pad: int):
        self.seen, self.rows, self.pad, self.epoch = seen, rows, pad, seen.epoch

    def make(self, numbers: np.ndarray) -> Batch:
        batch = self.seen.make(numbers)
        which = (batch.targets & ((1 << NUMBER) - 1)).tolist()
        tokens, valid = pad_rows([self.rows[number] for number in which], self.pad)
        return Batch(tokens, torch.arange(len(which)), valid, source=batch.tokens, count=len(which))


class Captions(Task):
    reads = "captions"
    forced = ("loss", "accuracy")
    decisive = "accuracy"
    files = "images"

    def open(self, tick: Callable[[int], None]) -> Any:
        job = self.job
        for name in ("source", "target", "columns", "header"):
            if getattr(job, name) is not None:
                raise UserError(f"a table names pictures and their texts, so there is no {name} to give")
        if job.data is None:
            raise UserError("which pictures? Give data=, a .tsv file: a picture's file, a tab and what it shows")
        self.pictures = open_pictures(job.data, job.dev, job.test, self.settings.seed, texts=True)
        return self.pictures

    def learn(self, corpus: Any, tick: Tick) -> None:
        kind = self.job.tokenizer or self.usual
        if kind.endswith(".json"):
            self.source = self.target = Tokenizer.load(kind)
        else:
            made = Tokenizer.train(kind, iter(corpus.train.answers), self.job.vocab, self.job.lowercase)
            self.source = self.target = made

    def complete(self, recipe: dict[str, Any]) -> None:
        recipe["vocab"] = self.source.size
        recipe["model"]["end"] = self.source.end

    def fit(self, model: Any) -> None:
        self.lens: Lens = usual(model.image.embed.sides, model.image.embed.channels, clip=True)

    def about(self) -> dict[str, Any]:
        return {"images": self.lens.table()}

    def objective(self) -> Objective:
        return Contrastive()  # type: ignore[return-value]

    def batches(self, model: Any, corpus: Pictures, say: Say, tick: Tick) -> Any:
        s = self.settings
        count = s.batch_size or max(s.batch_tokens // model.image.embed.count, 2)
        return self._prepared(model, corpus.train, "train.images", count, say, tick)

    def dev(self, model: Any, lines: Any) -> Any:
        captioned = self._prepared(model, lines, "dev.images", AMONG, silent, unseen, shuffle=False)
        return lambda model: measured(model, once(captioned), next(model.parameters()).device)

    def _prepared(
        self, model: Towers, shown: Shown, name: str, count: int, say: Say, tick: Tick, shuffle: bool = True
    ) -> Any:
        codes = (number | zlib.crc32(text.encode()) << NUMBER for number, text in enumerate(shown.answers))
        skip = self.job.bad_lines == "skip"
        rows, lost = prepare_pictures(shown, codes, self.lens, self.data(name), skip, partial(tick, "preparing"))
        if lost:
            say(f"{shown.name}: {lost:,} pictures cannot be read and are left out")
        texts = self.run(model, None, False).code(shown.answers, cut=True)
        if model.limit and (long := sum(len(ids) == model.limit for ids in texts)):
            say(f"{shown.name}: {long:,} texts fill the {model.limit} tokens that the model takes, and may be cut")
        return Captioned(Seen(rows, self.lens, count, self.settings.seed, shuffle), texts, self.source.pad)

    def run(self, model: Any, folder: Path | None, documents: bool) -> Any:
        return Pairer(model, self.source, self.target, folder, lens=self.lens)
