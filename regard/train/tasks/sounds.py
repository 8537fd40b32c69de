"""Recordings with a text each: an encoder of frames and a decoder."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from regard import metrics as measures
from regard.core import Model
from regard.data import Corpus, Lines, once
from regard.data.mel import HOP, RATE
from regard.data.recordings import Recorded, prepare_sounds, root_of
from regard.evaluate import gather
from regard.runs.checkpoint import put
from regard.train.dev import Dev
from regard.use.speech import TOLD
from regard.use.transcribe import Transcriber

from .task import DEV_TOKENS, Say, Task, Tick, silent, unseen


class Sounds(Task):
    """The recipe's [objective] may say what language is spoken and which task it is, for a model that is told so."""

    answered = measures.OF_TEXTS
    files = "sounds"

    def learn(self, corpus: Corpus, tick: Tick) -> None:
        self.source = self.target = self.tokenizer(corpus, self.job.tokenizer or self.usual, tick, 1)

    def batches(self, model: Model, corpus: Corpus, say: Say, tick: Tick) -> Any:
        told = Path(self.job.origin or "", TOLD)
        if self.job.origin and told.is_file():  # what it was told about its tokens is still true
            kept = Path(self.job.run, TOLD)
            kept.parent.mkdir(exist_ok=True)
            put(kept, told.read_text(encoding="utf-8"))
        return self._prepared(model, corpus.train, "train.sounds", self.settings.batch_tokens, say, tick)

    def dev(self, model: Model, lines: Lines) -> Dev:
        budget = max(self.settings.batch_tokens, DEV_TOKENS)
        batches = self._prepared(model, lines, "dev.sounds", budget, silent, unseen, shuffle=False)
        files, texts = gather(lines, self.job.any_reference, self.job.dev_most) if self.metrics else ((), ())
        files = [str(root_of(lines) / file) for file in files]
        return Dev(self.objective(), lambda: once(batches), self.run, self.forced, self.metrics, files, texts)  # type: ignore[arg-type]

    def _prepared(
        self, model: Model, lines: Lines, name: str, budget: int, say: Say, tick: Tick, shuffle: bool = True
    ) -> Recorded:
        run, s = self.run(model, None, False), self.settings
        limits = run.window * HOP, (model.limit or s.batch_tokens) - len(run.opening) + 1
        skip = self.job.bad_lines == "skip"
        data = prepare_sounds(lines, self.target, self.data(name), limits, skip, partial(tick, "preparing"))
        if data.left_out:
            say(
                f"{lines.name}: {data.left_out:,} recordings are left out, for they are longer than the "
                f"{limits[0] / RATE:g} s that the model hears (model.encoder.embed.length), their texts than "
                f"{limits[1]} tokens, or they cannot be read"
            )
        count = s.batch_size or budget * 2 // run.window
        return Recorded(data, count, s.seed, (run.window, run.bands), run.opening, self.target.pad, shuffle)

    def run(self, model: Model, folder: Path | None, documents: bool) -> Transcriber:
        made = Transcriber(model, self.source, self.target, folder)
        if folder is None and self.job.origin:
            made.listen_as(Path(self.job.origin))
        for name in ("language", "task"):
            if name in self.own:
                setattr(made, name, self.own[name])
        return made
