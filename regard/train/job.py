"""Prepare and run a training job, from the user's arguments to a finished run folder.

runs/x/  recipe.toml  run.json  tokenizer.json  metrics.jsonl  events...  data/  checkpoints/  model.safetensors
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tomli_w
import torch

from regard.core import Embed, Model, UserError, build, find
from regard.data import Corpus, CorpusSplit, ResumableBatches, open_corpus, overlap
from regard.data.layout import layout_of
from regard.decode import DecodeConfig
from regard.distill import check_teacher, distill
from regard.errors import in_one_line, short
from regard.files import recipe as recipes
from regard.files.paths import check_run_folder
from regard.memory import MetaWeights
from regard.runs import checkpoint
from regard.runs.folder import check_device, copy_origin, load_tokenizers, read_run_json
from regard.runs.job import Job
from regard.runs.provenance import PATHS, absolute_paths, session_record
from regard.runs.settings import Settings
from regard.tasks import Say, Task, Tick, no_progress, task_of
from regard.tasks.load import load
from regard.tasks.reader import Reader
from regard.tasks.run import Run
from regard.tasks.translate import Pairs

from . import automatic, origin
from .automatic import Choice
from .levels import freeze
from .loop import Progress, Trainer

MAX_THREADS = 1024


class Prepared:
    """A job that is ready to be trained: its recipe, task, corpus, model and trainer.

    run_info: the contents of run.json of a run that is resumed; None: a new run.
    bounds:   steps, minutes or epochs that replace those of the recipe.
    """

    def __init__(
        self, job: Job, say: Say, tick: Tick, run_info: dict[str, Any] | None, bounds: dict[str, float] | None
    ):
        self.job, self.folder, self.say, self.tick, self.run_info = job, Path(job.run), say, tick, run_info
        if not 0 <= job.threads <= MAX_THREADS:
            raise UserError(f"threads must be from 0 to {MAX_THREADS:,}, not {job.threads:,}")
        if job.threads:
            torch.set_num_threads(job.threads)
        self.chosen: list[Choice] = []
        if run_info:
            self.recipe = recipes.load(self.folder / "recipe.toml")
        else:
            self.recipe = origin.recipe_of(job)
            self.given = origin.given_settings(job, self.recipe)
            self._choose(automatic.choose_end(self.recipe.get("train", {}), bool(job.origin)))
        self.settings = Settings.read(self.recipe.get("train", {}))
        if bounds:
            self.settings = self.settings.until(bounds)
        self.task = self._task()(job, self.settings, self.recipe.get("objective"))
        self._check()
        self.teacher = self._load_teacher()
        self.corpus = self._open()
        if run_info:
            self._load_tokenizers()
        elif job.origin:
            self.task.inherit_tokenizers(*load_tokenizers(Path(job.origin)), self.corpus)
        elif self.teacher is not None and not self.teacher.converted and not (job.tokenizer or job.vocab):
            self.task.inherit_tokenizers(self.teacher.source, self.teacher.target, self.corpus)
        else:
            self._choose_tokenizer()
            self.task.learn_tokenizers(self.corpus, tick)
        self.model = self._build()
        self._write()
        try:
            if job.teacher:
                self.corpus = self._distilled()
            self.trainer = self._trainer(reset_patience=bool(bounds))
        except UserError:
            if not run_info:  # so that the folder can be used for another attempt
                (self.folder / "run.json").unlink()
            raise

    @property
    def name(self) -> str:
        """Return the recipe's name; where a run is fine-tuned without naming a recipe, that of the run it begins
        from."""
        if self.job.recipe or not self.job.origin:
            return self.job.recipe
        return read_run_json(Path(self.job.origin)).get("job", {}).get("recipe", "")

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
        """Refuse what can be refused before the data is read."""
        job, s = self.job, self.settings
        if not s.bounded:
            raise UserError("a run needs an end: give steps, minutes or epochs")
        DecodeConfig.read(self.recipe.get("decode", {}))
        self.task.set_metrics([*job.metrics, s.metric])
        check_device(job.device)

    def _load_teacher(self) -> Run | None:
        """Return the teacher whose answers are still to be written; None: there is none, or they are."""
        if not self.job.teacher or (self.run_info and self._distilled_path.exists()):
            return None
        self._distilled_path.unlink(missing_ok=True)  # of an attempt that was refused, perhaps with another teacher
        if not isinstance(self.task, Pairs):
            raise UserError(f"a teacher is for recipes that turn a text into another, and '{self.name}' does not")
        teacher = load(self.job.teacher, self.job.device)
        check_teacher(teacher)
        return teacher  # type: ignore[return-value]

    @property
    def _distilled_path(self) -> Path:
        return self.folder / "data" / "distilled.jsonl"

    def _distilled(self) -> Corpus:
        """Return the corpus with the teacher's answers in place of the targets of the training data."""
        if self.teacher is not None:
            done, begun = 0, time.perf_counter()

            def tick(count: int) -> None:
                nonlocal done
                done += count
                self.tick(f"distilling, of {self.corpus.train.count:,} sources", done)

            found = distill(self.teacher, self.corpus.train, self._distilled_path, tick=tick)
            seconds = time.perf_counter() - begun
            self.say(f"distilled: {found}, as {short(self.job.teacher)} answers them ({seconds:.0f} s)")
        lines = open_corpus(self._distilled_path, dev=0, test=0, max_chars=sys.maxsize).train
        return Corpus(lines, self.corpus.dev, self.corpus.test, [])

    def _open(self) -> Corpus:
        corpus = self.task.open(lambda n: self.tick("reading", n))
        for note in corpus.notes:
            self.say(note)
        if corpus.dev is None:
            asked = [*self.job.metrics, *(["patience"] if self.settings.patience else [])]
            asked += [self.settings.metric] if self.settings.metric not in self.task.loss_metrics else []
            if asked:
                raise UserError(f"there is no dev set, and '{asked[0]}' needs one: give --dev, a file or a share")
        elif self.task.reads == "pairs" and not self.run_info:
            shared = overlap(corpus.train, corpus.dev)
            if shared:
                self.say(f"warning: {shared} of the dev examples have a source that stands in the training data, too")
        return corpus

    def _choose(self, choices: Iterable[Choice], always: bool = False) -> None:
        """Write choices into the recipe, except for settings that the user gave. always: with --as-published, too."""
        if self.job.as_published and not always:
            return
        for choice in choices:
            section, _, key = choice.key.rpartition(".")
            if choice.key not in self.given:
                self.recipe.setdefault(section, {})[key] = choice.value
                self.chosen = [*(one for one in self.chosen if one.key != choice.key), choice]

    def _choose_tokenizer(self) -> None:
        job, lines = self.job, self.corpus.train
        if job.as_published or not isinstance(lines, CorpusSplit):
            return
        embed = self.recipe["model"].get("embed", "tokens")
        embed = embed if isinstance(embed, str) else embed.get("part", "tokens")
        chosen: list[Choice] = []
        if job.tokenizer is None:
            chosen = automatic.choose_tokenizer(type(self.task).__name__, find(Embed, embed).whole_words, lines)
        kind = next(
            (choice.value for choice in chosen if choice.key == "tokenizer"),
            job.tokenizer or self.task.default_tokenizer,
        )
        if automatic.has_vocab_size(kind) and not any(choice.key == "vocab" for choice in chosen):
            chosen.append(automatic.choose_vocab(lines, self.task.text_columns))
        for choice in chosen:
            if not getattr(job, choice.key):
                setattr(job, choice.key, choice.value)
                self.chosen.append(choice)

    def _choose_training(self) -> None:
        """Choose training settings by the sizes of the model and of the data. There are rules for texts only."""
        lines = self.corpus.train
        if isinstance(lines, CorpusSplit) and not self.job.as_published:
            own = {key: value for key, value in self.recipe["model"].items() if key != "passes"}
            with MetaWeights():
                model = build(self.recipe | {"model": own})
            facts = automatic.gather_facts(self.task, model, lines, self.recipe.get("train", {}), self.given)
            choose = automatic.choose_for_fine_tuning if self.job.origin else automatic.choose_from_scratch
            self._choose(choose(facts))
        self.settings = self.task.settings = Settings.read(self.recipe.get("train", {}))
        if self.chosen:
            self.say(automatic.describe(self.chosen, self.job.as_published))

    def _load_tokenizers(self) -> None:
        assert self.run_info is not None
        if self.run_info.get("tokenizers") == []:
            return
        self.task.source, self.task.target = both = load_tokenizers(self.folder)
        if [one.hash() for one in both] != self.run_info.get("tokenizers"):
            raise UserError(f"{short(self.folder)}: the tokenizer is not the one that this run began with")

    def _build(self) -> Model:
        if not self.run_info:
            vocab = self.recipe.get("vocab")
            self.task.complete_recipe(self.recipe)
            self.recipe["vocab"] = vocab if self.job.origin else self.recipe["vocab"]  # a table may have spare rows
            self._choose(automatic.choose_tie(self.recipe), always=True)
            if self.corpus.dev is not None:
                self.recipe.setdefault("train", {}).setdefault("metric", self.task.default_metric)
            self._choose_training()
            self.recipe["train"] = self.settings.table()
        torch.manual_seed(self.settings.seed)
        model = build(self.recipe)
        self.task.check_model(model)
        if self.job.origin and not checkpoint.list_checkpoints(self.folder / "checkpoints"):
            new = [*([origin.HEAD] if self.job.task else []), *(["*.down", "*.up"] if self.job.lora else [])]
            origin.load_weights(model, Path(self.job.origin), new)
        freeze(model, self.settings.freeze)
        return model.to(self.job.device)

    def _write(self) -> None:
        """Write the run folder except for the weights, before any long work. run.json comes last: a folder that has it
        is complete."""
        put = checkpoint.write_atomically
        if self.run_info:
            run_info = self.run_info | {"sessions": [*self.run_info.get("sessions", []), session_record()]}
        else:
            both = self.task.tokenizers
            names = ("tokenizer",) if both and both[0] is both[1] else ("source.tokenizer", "target.tokenizer")
            for name, tokenizer in zip(names, both, strict=False):
                tokenizer.save(self.folder / f"{name}.json")
            if self.job.origin:
                copy_origin(Path(self.job.origin), self.folder)
            run_info = {"job": asdict(self.job) | {"recipe": self.name}, "documents": self.corpus.train.documents}
            run_info |= {"tokenizers": [one.hash() for one in both]} | self._inherited_info(len(names) > 1)
            if isinstance(self.corpus.train, CorpusSplit):
                run_info["table"] = layout_of(self.corpus.train.records.pick)
            run_info |= self.task.run_info() | {"chosen": [choice._asdict() for choice in self.chosen]}
            run_info |= {"machine": {"platform": platform.platform(), "cores": os.cpu_count()}}
            every = list(self.model.parameters())
            run_info |= {"parameters": sum(p.numel() for p in every), "sessions": [session_record()]}
            run_info |= {"learning": sum(p.numel() for p in every if p.requires_grad)}
        put(self.folder / "recipe.toml", tomli_w.dumps(self.recipe | {"train": self.settings.table()}))
        put(self.folder / "run.json", json.dumps(run_info, indent=1))

    def _inherited_info(self, apart: bool) -> dict[str, Any]:
        """Return the entries of the original run's run.json that still hold. apart: the target has its own
        tokenizer."""
        if not self.job.origin:
            return {}
        before = read_run_json(Path(self.job.origin))
        kept = {key: before[key] for key in ("origin", "marks", "target_marks") if key in before}
        return kept | ({"target_marks": None} if apart and self.job.task and "marks" in kept else {})

    def _trainer(self, reset_patience: bool) -> Trainer:
        s, corpus, task = self.settings, self.corpus, self.task
        batches = task.batches(self.model, corpus, self.say, self.tick)
        dev = None if corpus.dev is None else task.dev(self.model, corpus.dev)
        self._check_same_data()
        return Trainer(
            self.model,
            task.objective(),
            ResumableBatches(batches),
            s,
            self.folder,
            dev,
            say=self.say,
            reset_patience=reset_patience,
        )

    def _check_same_data(self) -> None:
        """Refuse to resume a run whose data has changed."""
        names = [
            f"{part}.{self.task.file_suffix}" for part in ("train", "dev") if getattr(self.corpus, part) is not None
        ]
        data = self.folder / "data"
        now, file = checkpoint.sha256_sums(data, names), data / checkpoint.SUMS
        if not file.exists():
            checkpoint.write_atomically(file, now)
        elif file.read_text(encoding="utf-8") != now:
            raise UserError(
                f"{self.corpus.train.name}: the data is not what it was when this run began: bring it back, or begin "
                "a new run"
            )

    def train(self, report: Callable[[Progress], None] = lambda progress: None) -> Run | Reader:
        """Train to the end and return the finished run, ready to predict."""
        self.trainer.report = report
        self.trainer.train()
        return self.task.make_predictor(self.model, self.folder, self.corpus.train.documents)


def start(job: Job, say: Say = print, tick: Tick = no_progress) -> Prepared:
    """Prepare a new run. A folder that holds a run already is refused."""
    run = Path(job.run)
    if job.teacher and job.data is None and job.source is None:
        job = _with_data_of_teacher(job)
    with checkpoint.locked(run):
        if (run / "run.json").exists():
            raise UserError(
                f"{short(run)} holds a run already: go on with it by --resume {short(run)}, or name another"
            )
        names = PATHS if job.data else (*PATHS, "source", "target")  # else these are endings, such as en and de
        names = names if job.origin is None else (*names, "origin")
        names = names if job.teacher is None else (*names, "teacher")
        rooted: dict[str, Any] = {name: absolute_paths(getattr(job, name)) for name in names}
        return Prepared(replace(job, **rooted), say, tick, None, None)


def _with_data_of_teacher(job: Job) -> Job:
    """Return the job with the data that its teacher was trained on."""
    assert job.teacher is not None
    if not Path(job.teacher).is_dir():
        raise UserError(f"there is no run folder '{short(job.teacher)}'")
    own = read_run_json(Path(job.teacher)).get("job", {})
    if not isinstance(own, dict) or (own.get("data") is None and own.get("source") is None):
        raise UserError(f"{short(job.teacher)} does not record its training data: name some with --data")
    given = {name: getattr(job, name) for name in ("dev", "test", "columns", "header")}
    names = ("data", "source", "target", *(name for name, value in given.items() if value is None))
    return replace(job, **{name: own.get(name) for name in names}, bad_lines=own.get("bad_lines", job.bad_lines))


def resume(
    folder: str | Path,
    bounds: dict[str, float] | None = None,
    say: Say = print,
    tick: Tick = no_progress,
    device: str | None = None,
    threads: int | None = None,
) -> Prepared:
    """Prepare to resume a run, also a finished one.

    bounds:          the new end: steps, minutes or epochs of the whole run.
    device, threads: used instead of those before.
    """
    run = Path(folder)
    check_run_folder(run)
    if not (run / "run.json").exists():
        raise UserError(f"{short(run)} holds no run to go on with: there is no run.json in it")
    if (run / checkpoint.MODEL).exists() and not checkpoint.list_checkpoints(run / "checkpoints"):
        raise UserError(
            f"{short(run)} holds a model without a checkpoint to go on from: begin a new run with --from {short(run)}"
        )
    with checkpoint.locked(run):
        run_info = read_run_json(run)
        try:
            job = Job(**run_info["job"])
        except (KeyError, TypeError) as error:
            raise UserError(f"{short(run / 'run.json')} does not describe a run: {in_one_line(error)}") from None
        _check_bounds(run, bounds or {}, say)
        there = {"device": job.device if device is None else device, "threads": threads or job.threads}
        return Prepared(replace(job, run=str(run), **there), say, tick, run_info, bounds)


def _check_bounds(run: Path, bounds: dict[str, float], say: Say) -> None:
    """Refuse bounds that a finished run has passed already. A run that was stopped may end where it is; say so."""
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
        reason = f"{name} count from the beginning of a run, and {short(run)} has had {so_far:g} of them"
        if (run / checkpoint.MODEL).exists():
            raise UserError(f"{reason}: to go on, give a later end, such as --{name} {so_far + asked:g}")
        return say(f"{reason}, so it ends here")
