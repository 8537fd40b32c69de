"""A training run from what the user asked to a finished run folder.

runs/x/  recipe.toml  run.json  tokenizer.json  metrics.jsonl  events...  data/  checkpoints/  model.safetensors
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
import torch

from regard import metrics as measures
from regard.core import Model, UserError, build
from regard.core import recipe as recipes
from regard.core.errors import in_one_line, nearest, short
from regard.data import Bucketed, Corpus, Feed, Tokenizer, Windows, once, open_corpus, overlap, prepare, prepare_text
from regard.decode import Way
from regard.evaluate import gather
from regard.run import Run, about, tokenizers

from . import checkpoint
from .dev import FORCED, Dev, windows
from .loop import Progress, Trainer
from .objectives.next_token import NextToken
from .session import PATHS, session, whole
from .settings import Settings

DEV_TOKENS = 8192  # of a dev batch

Say = Callable[[str], None]
Tick = Callable[[str, int], None]


@dataclass
class Job:
    """Everything that a run depends on, besides the files it reads. Kept in run.json.

    data, source, target, dev, test, columns, bad_lines: as in regard.data.open_corpus.
    longest:       tokens of a side; 0: what the batch and the positions allow. Longer examples are left out.
    tokenizer:     bpe, wordpiece, unigram, characters, bytes, words, pretokenised, or a tokenizer.json; for source and
                   target apart: "characters,pretokenised".
    vocab:         tokens of a tokenizer that is learned here.
    metrics:       measured on dev by decoding, besides the loss.
    any_reference: where a source stands on several lines, each of its targets counts as right.
    dev_most:      dev examples that are decoded at every evaluation; 0: all.
    threads:       0: as many as torch takes.
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


class Prepared:
    """What a job comes to: a model, its data, and the trainer between them.

    told:   what run.json says, of a run that goes on; None: a new one.
    bounds: where it ends instead of where its recipe says.
    """

    def __init__(self, job: Job, say: Say, tick: Tick, told: dict[str, Any] | None, bounds: dict[str, float] | None):
        self.job, self.folder, self.say, self.tick, self.told = job, Path(job.run), say, tick, told
        if job.threads:
            torch.set_num_threads(job.threads)
        if told:
            self.recipe = recipes.load(self.folder / "recipe.toml")
        else:
            self.recipe = recipes.load(job.recipe, job.size, job.overrides)
        self.settings = Settings.read(self.recipe.get("train", {}))
        if bounds:
            self.settings = self.settings.until(bounds)
        self.pairs = self.recipe["model"].get("kind") == "encoder-decoder"
        self._check()
        self.corpus = self._open()
        self.source, self.target = self._known_tokenizers() if told else self._learn_tokenizers()
        torch.manual_seed(self.settings.seed)
        self.model = self._build()
        self._write()
        try:
            self.trainer = self._trainer(patient=bool(bounds))
        except UserError:
            if not told:  # to be tried again, not gone on with
                (self.folder / "run.json").unlink()
            raise

    def _check(self) -> None:
        """All that can be refused before the data is read."""
        job, s = self.job, self.settings
        if not s.bounded:
            raise UserError("a run needs an end: give steps, minutes or epochs")
        objective = self.recipe.get("objective", {}).get("part", "next_token")
        if objective != "next_token" or self.recipe["model"].get("kind") == "encoder":
            raise UserError(f"recipe '{job.recipe}' has the objective '{objective}', which cannot be trained yet")
        Way.read(self.recipe.get("decode", {}))
        measures.check(job.metrics)
        known = (*FORCED, *measures.KNOWN)
        if s.metric not in known:
            raise UserError(f"train.metric '{s.metric}' is unknown{nearest(s.metric, known)}")
        self.metrics = list(dict.fromkeys(name for name in (*job.metrics, s.metric) if name not in FORCED))
        if self.metrics and not self.pairs:
            raise UserError(f"'{self.metrics[0]}' wants right answers, and a language model has none: say loss")
        try:
            torch.empty(0, device=job.device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise UserError(f"there is no device '{job.device}' here: {in_one_line(error)}") from None

    def _open(self) -> Corpus:
        job = self.job
        corpus = open_corpus(
            job.data, job.source, job.target, job.dev, job.test, job.columns, "pairs" if self.pairs else "text",
            job.bad_lines, self.settings.seed, tick=lambda n: self.tick("reading", n),
        )  # fmt: skip
        for note in corpus.notes:
            self.say(note)
        if corpus.dev is None:
            asked = [*self.metrics, *(["patience"] if self.settings.patience else [])]
            if asked:
                raise UserError(f"there is no dev set, and '{asked[0]}' needs one: give dev=, a file or a share")
        elif self.pairs and not self.told:
            shared = overlap(corpus.train, corpus.dev)
            if shared:
                self.say(f"warning: {shared} of the dev examples have a source that stands in the training data, too")
        return corpus

    def _learn_tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        job = self.job
        kinds = (job.tokenizer or ("bpe" if self.pairs else "characters")).split(",")
        if len(kinds) > (2 if self.pairs else 1):
            more = "one for both sides, or two with a comma between" if self.pairs else "a language model has one"
            raise UserError(f"tokenizer '{job.tokenizer}': {more}")

        def one(kind: str, *columns: int) -> Tokenizer:
            if kind.endswith(".json"):
                return Tokenizer.load(kind)
            self.tick("learning the tokenizer", 0)
            return Tokenizer.train(kind, self.corpus.train.texts(*columns), job.vocab, job.lowercase)

        if len(kinds) == 1:
            joint = one(kinds[0])
            return joint, joint
        return one(kinds[0], 0), one(kinds[1], 1)

    def _known_tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        assert self.told is not None
        both = tokenizers(self.folder)
        if [one.hash() for one in both] != self.told.get("tokenizers"):
            raise UserError(f"{short(self.folder)}: the tokenizer is not the one that this run began with")
        return both

    def _build(self) -> Model:
        if not self.told:
            joint = self.source is self.target
            self.recipe["vocab"] = self.target.size if joint else [self.source.size, self.target.size]
            self.recipe["train"] = self.settings.table()
        model = build(self.recipe)
        context = self.settings.context
        if not self.pairs and model.limit is not None and context > model.limit:
            raise UserError(f"train.context is {context}, and the positions of this model reach only {model.limit}")
        return model.to(self.job.device)

    def _write(self) -> None:
        """Everything but the weights, before any long work. run.json comes last: a folder with it is complete."""
        put = checkpoint.put
        if self.told:
            told = self.told | {"sessions": [*self.told.get("sessions", []), session()]}
        else:
            names = ("tokenizer",) if self.source is self.target else ("source.tokenizer", "target.tokenizer")
            for name, tokenizer in zip(names, (self.source, self.target), strict=False):
                tokenizer.save(self.folder / f"{name}.json")
            told = {"job": asdict(self.job), "documents": self.corpus.train.documents}
            told |= {"tokenizers": [self.source.hash(), self.target.hash()]}
            told |= {"machine": {"platform": platform.platform(), "cores": os.cpu_count()}}
            told |= {"parameters": sum(p.numel() for p in self.model.parameters()), "sessions": [session()]}
        put(self.folder / "recipe.toml", tomli_w.dumps(self.recipe | {"train": self.settings.table()}))
        put(self.folder / "run.json", json.dumps(told, indent=1))

    def _trainer(self, patient: bool) -> Trainer:
        s, corpus = self.settings, self.corpus
        tick = partial(self.tick, "preparing")
        if self.pairs:
            data = prepare(corpus.train, self._both, self._data("train.arrow"), self._longest(), tick)
            if data.left_out:
                most = " and ".join(str(n) for n in dict.fromkeys(self._longest()))
                self.say(f"{data.left_out} examples are longer than {most} tokens and are left out")
            batches: Bucketed | Windows = Bucketed(data, s.batch, s.seed, self.target.start, self.target.pad)
        else:
            stream = prepare_text(corpus.train, self.target, self._data("train.ids"), tick)
            batches = Windows(stream, s.context, s.rows or max(s.batch // s.context, 1), s.seed)
        dev = None if corpus.dev is None else self._dev()
        self._same_data()
        objective = NextToken(s.smoothing)
        return Trainer(self.model, objective, Feed(batches), s, self.folder, dev, say=self.say, patient=patient)

    @property
    def _both(self) -> tuple[Tokenizer, Tokenizer]:
        return self.source, self.target

    def _data(self, name: str) -> Path:
        return self.folder / "data" / name

    def _longest(self) -> tuple[int, int]:
        """Tokens that a source and a target may have: what fits a batch, and what the positions reach."""
        most = min(self.job.longest or self.settings.batch, self.settings.batch)
        return min(most, self.model.source_limit or most), min(most, self.model.limit or most)

    def _dev(self) -> Dev:
        s, dev, job = self.settings, self.corpus.dev, self.job
        assert dev is not None
        if not self.pairs:
            text = prepare_text(dev, self.target, self._data("dev.ids"))
            before = Run(self.model, *self._both, documents=dev.documents).opening[-1]
            rows = max(DEV_TOKENS // s.context, 1)
            return Dev(lambda: windows(text, before, s.context, rows, self.target.pad), self._both)
        data = prepare(dev, self._both, self._data("dev.arrow"), self._longest())
        batches = Bucketed(data, max(s.batch, DEV_TOKENS), s.seed, self.target.start, self.target.pad, shuffle=False)
        asked = gather(dev, job.any_reference, job.dev_most) if self.metrics else ((), ())
        return Dev(lambda: once(batches), self._both, self.metrics, *asked)

    def _same_data(self) -> None:
        """What is learned from is the same in a run that goes on, whatever became of the files meanwhile."""
        ending = "arrow" if self.pairs else "ids"
        names = [f"{part}.{ending}" for part in ("train", "dev") if getattr(self.corpus, part) is not None]
        now, known = checkpoint.sums(self._data(""), names), self._data(checkpoint.SUMS)
        if not known.exists():
            checkpoint.put(known, now)
        elif known.read_text(encoding="utf-8") != now:
            raise UserError(
                f"{self.corpus.train.name}: the data is not what it was when this run began: bring it back, or begin "
                "a new run"
            )

    def train(self, report: Callable[[Progress], None] = lambda progress: None) -> Run:
        """Until the end. The finished model, ready to be used."""
        self.trainer.report = report
        self.trainer.train()
        return Run(self.model, *self._both, self.folder, self.corpus.train.documents)


def silent(what: str, done: int) -> None:
    """Nobody watches."""


def start(job: Job, say: Say = print, tick: Tick = silent) -> Prepared:
    """A new run. A folder that holds one already is left alone."""
    run = Path(job.run)
    with checkpoint.alone(run):
        if (run / "run.json").exists():
            raise UserError(
                f"{short(run)} holds a run already: go on with it by --resume {short(run)}, or name another"
            )
        names = PATHS if job.data else (*PATHS, "source", "target")  # else these are endings, such as en and de
        rooted: dict[str, Any] = {name: whole(getattr(job, name)) for name in names}
        return Prepared(replace(job, **rooted), say, tick, None, None)


def resume(
    folder: str | Path, bounds: dict[str, float] | None = None, say: Say = print, tick: Tick = silent
) -> Prepared:
    """Go on with a run. `bounds` (steps, minutes, epochs, of the whole run) are its new end, also of one that was
    finished."""
    run = Path(folder)
    if not (run / "run.json").exists():
        raise UserError(f"{short(run)} holds no run to go on with: there is no run.json in it")
    with checkpoint.alone(run):
        told = about(run)
        try:
            job = Job(**told["job"])
        except (KeyError, TypeError) as error:
            raise UserError(f"{short(run / 'run.json')} does not describe a run: {in_one_line(error)}") from None
        return Prepared(replace(job, run=str(run)), say, tick, told, bounds)
