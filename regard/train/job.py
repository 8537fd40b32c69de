"""A training run from what the user asked to a finished run folder.

runs/x/  recipe.toml  run.json  tokenizer.json  metrics.jsonl  events...  data/  checkpoints/  model.safetensors
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tomli_w
import torch

from regard.core import Embed, Model, UserError, build, find
from regard.data import Corpus, Feed, Lines, overlap
from regard.data.layout import layout_of
from regard.decode import DecodeConfig
from regard.errors import in_one_line, short
from regard.files import recipe as recipes
from regard.files.paths import check_run_folder
from regard.memory import MetaWeights
from regard.runs import checkpoint
from regard.runs.folder import about, keep_origin, must_have, tokenizers
from regard.runs.job import Job
from regard.runs.session import PATHS, session, whole
from regard.runs.settings import Settings
from regard.tasks import Say, Task, Tick, task_of, unseen
from regard.tasks.reader import Reader
from regard.tasks.run import Run

from . import automatic, origin
from .automatic import Choice
from .levels import freeze
from .loop import Progress, Trainer

THREADS = 1024  # at the most


class Prepared:
    """What a job comes to: a model, its data, and the trainer between them.

    told:   what run.json says, of a run that goes on; None: a new one.
    bounds: where it ends instead of where its recipe says.
    """

    def __init__(self, job: Job, say: Say, tick: Tick, told: dict[str, Any] | None, bounds: dict[str, float] | None):
        self.job, self.folder, self.say, self.tick, self.told = job, Path(job.run), say, tick, told
        if not 0 <= job.threads <= THREADS:
            raise UserError(f"threads must be from 0 to {THREADS:,}, not {job.threads:,}")
        if job.threads:
            torch.set_num_threads(job.threads)
        self.chosen: list[Choice] = []
        if told:
            self.recipe = recipes.load(self.folder / "recipe.toml")
        else:
            self.recipe = origin.recipe_of(job)
            self.given = origin.given(job, self.recipe)
            self._choose(automatic.end(self.recipe.get("train", {}), bool(job.origin)))
        self.settings = Settings.read(self.recipe.get("train", {}))
        if bounds:
            self.settings = self.settings.until(bounds)
        self.task = self._task()(job, self.settings, self.recipe.get("objective"))
        self._check()
        self.corpus = self._open()
        if told:
            self._take_tokenizers()
        elif job.origin:
            self.task.inherit(*tokenizers(Path(job.origin)), self.corpus)
        else:
            self._choose_tokenizer()
            self.task.learn(self.corpus, tick)
        self.model = self._build()
        self._write()
        try:
            self.trainer = self._trainer(patient=bool(bounds))
        except UserError:
            if not told:  # to be tried again, not gone on with
                (self.folder / "run.json").unlink()
            raise

    @property
    def name(self) -> str:
        """Of the recipe; of a run that begins from another one and names none, the other's."""
        if self.job.recipe or not self.job.origin:
            return self.job.recipe
        return about(Path(self.job.origin)).get("job", {}).get("recipe", "")

    def _task(self) -> type[Task]:
        try:
            return task_of(self.recipe, self.name)
        except UserError:
            if not self.job.origin or self.job.task:
                raise
            learned = self.recipe.get("objective", {}).get("part")
            raise UserError(
                f"{short(self.job.origin)} has learned '{learned}', and cannot go on with that: say --task classify, "
                "match or tag"
            ) from None

    def _check(self) -> None:
        """All that can be refused before the data is read."""
        job, s = self.job, self.settings
        if not s.bounded:
            raise UserError("a run needs an end: give steps, minutes or epochs")
        DecodeConfig.read(self.recipe.get("decode", {}))
        self.task.ask([*job.metrics, s.metric])
        must_have(job.device)

    def _open(self) -> Corpus:
        corpus = self.task.open(lambda n: self.tick("reading", n))
        for note in corpus.notes:
            self.say(note)
        if corpus.dev is None:
            asked = [*self.job.metrics, *(["patience"] if self.settings.patience else [])]
            asked += [self.settings.metric] if self.settings.metric not in self.task.forced else []
            if asked:
                raise UserError(f"there is no dev set, and '{asked[0]}' needs one: give dev=, a file or a share")
        elif self.task.reads == "pairs" and not self.told:
            shared = overlap(corpus.train, corpus.dev)
            if shared:
                self.say(f"warning: {shared} of the dev examples have a source that stands in the training data, too")
        return corpus

    def _choose(self, choices: Iterable[Choice], always: bool = False) -> None:
        """Take over what was chosen into the recipe, but for what was given. always: --as-published, too."""
        if self.job.as_published and not always:
            return
        for choice in choices:
            section, _, key = choice.key.rpartition(".")
            if choice.key not in self.given:
                self.recipe.setdefault(section, {})[key] = choice.value
                self.chosen = [*(one for one in self.chosen if one.key != choice.key), choice]

    def _choose_tokenizer(self) -> None:
        job, lines = self.job, self.corpus.train
        if job.as_published or not isinstance(lines, Lines):
            return
        embed = self.recipe["model"].get("embed", "tokens")
        embed = embed if isinstance(embed, str) else embed.get("part", "tokens")
        chosen: list[Choice] = []
        if job.tokenizer is None:
            chosen = automatic.tokenizer(type(self.task).__name__, find(Embed, embed).whole_words, lines)
        kind = next((choice.value for choice in chosen if choice.key == "tokenizer"), job.tokenizer or self.task.usual)
        if automatic.is_sized(kind) and not any(choice.key == "vocab" for choice in chosen):
            chosen.append(automatic.vocabulary(lines, self.task.texts))
        for choice in chosen:
            if not getattr(job, choice.key):
                setattr(job, choice.key, choice.value)
                self.chosen.append(choice)

    def _choose_training(self) -> None:
        """Once the sizes of the model and of the data are known; for texts, of which the rules know something."""
        lines = self.corpus.train
        if isinstance(lines, Lines) and not self.job.as_published:
            own = {key: value for key, value in self.recipe["model"].items() if key != "passes"}
            with MetaWeights():
                model = build(self.recipe | {"model": own})
            known = automatic.facts(self.task, model, lines, self.recipe.get("train", {}), self.given)
            self._choose((automatic.fine_tuning if self.job.origin else automatic.from_scratch)(known))
        self.settings = self.task.settings = Settings.read(self.recipe.get("train", {}))
        if self.chosen:
            self.say(automatic.sentence(self.chosen, self.job.as_published))

    def _take_tokenizers(self) -> None:
        assert self.told is not None
        if self.told.get("tokenizers") == []:
            return
        self.task.source, self.task.target = both = tokenizers(self.folder)
        if [one.hash() for one in both] != self.told.get("tokenizers"):
            raise UserError(f"{short(self.folder)}: the tokenizer is not the one that this run began with")

    def _build(self) -> Model:
        if not self.told:
            known = self.recipe.get("vocab")
            self.task.complete(self.recipe)
            self.recipe["vocab"] = known if self.job.origin else self.recipe["vocab"]  # tables may be larger than asked
            self._choose(automatic.tie(self.recipe), always=True)
            if self.corpus.dev is not None:
                self.recipe.setdefault("train", {}).setdefault("metric", self.task.decisive)
            self._choose_training()
            self.recipe["train"] = self.settings.table()
        torch.manual_seed(self.settings.seed)
        model = build(self.recipe)
        self.task.fit(model)
        if self.job.origin and not checkpoint.found(self.folder / "checkpoints"):
            afresh = [*([origin.HEAD] if self.job.task else []), *(["*.down", "*.up"] if self.job.lora else [])]
            origin.fill(model, Path(self.job.origin), afresh)
        freeze(model, self.settings.freeze)
        return model.to(self.job.device)

    def _write(self) -> None:
        """Everything but the weights, before any long work. run.json comes last: a folder with it is complete."""
        put = checkpoint.put
        if self.told:
            told = self.told | {"sessions": [*self.told.get("sessions", []), session()]}
        else:
            both = self.task.tokenizers
            names = ("tokenizer",) if both and both[0] is both[1] else ("source.tokenizer", "target.tokenizer")
            for name, tokenizer in zip(names, both, strict=False):
                tokenizer.save(self.folder / f"{name}.json")
            if self.job.origin:
                keep_origin(Path(self.job.origin), self.folder)
            told = {"job": asdict(self.job) | {"recipe": self.name}, "documents": self.corpus.train.documents}
            told |= {"tokenizers": [one.hash() for one in both]} | self._taken_over(len(names) > 1)
            if isinstance(self.corpus.train, Lines):
                told["table"] = layout_of(self.corpus.train.records.pick)
            told |= self.task.about() | {"chosen": [choice._asdict() for choice in self.chosen]}
            told |= {"machine": {"platform": platform.platform(), "cores": os.cpu_count()}}
            every = list(self.model.parameters())
            told |= {"parameters": sum(p.numel() for p in every), "sessions": [session()]}
            told |= {"learning": sum(p.numel() for p in every if p.requires_grad)}
        put(self.folder / "recipe.toml", tomli_w.dumps(self.recipe | {"train": self.settings.table()}))
        put(self.folder / "run.json", json.dumps(told, indent=1))

    def _taken_over(self, apart: bool) -> dict[str, Any]:
        """What is still true of a model that came from elsewhere. apart: the target has a tokenizer of its own."""
        if not self.job.origin:
            return {}
        before = about(Path(self.job.origin))
        kept = {key: before[key] for key in ("origin", "marks", "target_marks") if key in before}
        return kept | ({"target_marks": None} if apart and self.job.task and "marks" in kept else {})

    def _trainer(self, patient: bool) -> Trainer:
        s, corpus, task = self.settings, self.corpus, self.task
        batches = task.batches(self.model, corpus, self.say, self.tick)
        dev = None if corpus.dev is None else task.dev(self.model, corpus.dev)
        self._same_data()
        return Trainer(self.model, task.objective(), Feed(batches), s, self.folder, dev, say=self.say, patient=patient)

    def _same_data(self) -> None:
        """What is learned from is the same in a run that goes on, whatever became of the files meanwhile."""
        names = [f"{part}.{self.task.files}" for part in ("train", "dev") if getattr(self.corpus, part) is not None]
        data = self.folder / "data"
        now, known = checkpoint.sums(data, names), data / checkpoint.SUMS
        if not known.exists():
            checkpoint.put(known, now)
        elif known.read_text(encoding="utf-8") != now:
            raise UserError(
                f"{self.corpus.train.name}: the data is not what it was when this run began: bring it back, or begin "
                "a new run"
            )

    def train(self, report: Callable[[Progress], None] = lambda progress: None) -> Run | Reader:
        """Until the end. The finished model, ready to be used."""
        self.trainer.report = report
        self.trainer.train()
        return self.task.run(self.model, self.folder, self.corpus.train.documents)


def start(job: Job, say: Say = print, tick: Tick = unseen) -> Prepared:
    """A new run. A folder that holds one already is left alone."""
    run = Path(job.run)
    with checkpoint.alone(run):
        if (run / "run.json").exists():
            raise UserError(
                f"{short(run)} holds a run already: go on with it by --resume {short(run)}, or name another"
            )
        names = PATHS if job.data else (*PATHS, "source", "target")  # else these are endings, such as en and de
        names = names if job.origin is None else (*names, "origin")
        rooted: dict[str, Any] = {name: whole(getattr(job, name)) for name in names}
        return Prepared(replace(job, **rooted), say, tick, None, None)


def resume(
    folder: str | Path,
    bounds: dict[str, float] | None = None,
    say: Say = print,
    tick: Tick = unseen,
    device: str | None = None,
    threads: int | None = None,
) -> Prepared:
    """Go on with a run. `bounds` (steps, minutes, epochs, of the whole run) are its new end, also of one that was
    finished. device, threads: where and with how many it goes on, if not as before."""
    run = Path(folder)
    check_run_folder(run)
    if not (run / "run.json").exists():
        raise UserError(f"{short(run)} holds no run to go on with: there is no run.json in it")
    if (run / checkpoint.MODEL).exists() and not checkpoint.found(run / "checkpoints"):
        raise UserError(
            f"{short(run)} holds a model without a checkpoint to go on from: begin a new run with --from {short(run)}"
        )
    with checkpoint.alone(run):
        told = about(run)
        try:
            job = Job(**told["job"])
        except (KeyError, TypeError) as error:
            raise UserError(f"{short(run / 'run.json')} does not describe a run: {in_one_line(error)}") from None
        _look_ahead(run, bounds or {}, say)
        there = {"device": job.device if device is None else device, "threads": threads or job.threads}
        return Prepared(replace(job, run=str(run), **there), say, tick, told, bounds)


def _look_ahead(run: Path, bounds: dict[str, float], say: Say) -> None:
    """Refuse an end that a finished run is past already. One that was stopped may end where it is, and it is told."""
    numbers = checkpoint.newest(run / "checkpoints").numbers
    had = {
        "steps": numbers.get("step", 0),
        "minutes": numbers.get("elapsed", 0) / 60,
        "epochs": numbers.get("epoch", 0),
    }
    for name, asked in bounds.items():
        if name not in had or not 0 < asked <= had[name]:
            continue
        so_far = round(had[name], 1 if had[name] >= 1 else 4)
        told = f"{name} count from the beginning of a run, and {short(run)} has had {so_far:g} of them"
        if (run / checkpoint.MODEL).exists():
            raise UserError(f"{told}: to go on, give a later end, such as --{name} {so_far + asked:g}")
        return say(f"{told}, so it ends here")
