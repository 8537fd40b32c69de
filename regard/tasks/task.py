"""The base of all tasks: how a corpus becomes tokens and batches, and how a model is evaluated on the dev set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from regard import metrics as measures
from regard.core import Model, Pattern, Stack, UserError
from regard.data import Batches, Corpus, CorpusSplit, Tokenizer, open_corpus, prepare
from regard.data.batches import SequenceDataset
from regard.data.prepare import Coder
from regard.parts.objectives.next_token import NextToken
from regard.parts.objectives.objective import Objective
from regard.pattern.analysis import first_blind_query
from regard.runs.job import Job
from regard.runs.settings import Settings

from .dev import LOSS_METRICS, Dev
from .reader import Reader
from .run import Run

DEV_TOKENS = 8192  # the least tokens of a dev batch

Say = Callable[[str], None]
Tick = Callable[[str, int], None]


def say_nothing(sentence: str) -> None:
    """Ignore a message."""


def no_progress(what: str, done: int) -> None:
    """Ignore progress."""


def check_patterns(stack: Stack, lengths: Sequence[int]) -> None:
    """Refuse a pattern by which some position of sequences of these lengths could attend to nothing."""
    for index, layer in enumerate(list(stack.layers)[: stack.kinds]):
        for name, mixer in layer.branches.items():  # type: ignore[union-attr, operator]
            pattern = getattr(mixer, "pattern", None)
            if not isinstance(pattern, Pattern) or not pattern.fixed or getattr(mixer, "over", "self") != "self":
                continue
            for length in lengths:
                blind_position = first_blind_query(pattern, length)
                if blind_position is not None:
                    raise UserError(
                        f"pattern '{pattern}' leaves position {blind_position} of a sequence of {length} with nothing "
                        "to see: add, say, '| window(1)'",
                        ("layer", f"[{index}]", name),
                    )


class Task:
    """A task that models are trained for. A subclass that sets `objective_name` is found by it.

    objective_name:    the objective.part of the recipes that it is for.
    kind:              the kind of model that it is for; empty: any.
    inputs:            what the embedding of the model must read, such as images; empty: anything.
    trainable:         whether it can be trained here; else its models are converted.
    predictor:         the class that makes predictions with a trained model.
    reads:             the kind of a record of the corpus, for open_corpus.
    loss_metrics:      metrics that come with the loss and are always measured.
    answer_metrics:    metrics of the model's own answers, which can be asked for.
    default_metric:    the metric that decides the best model by default; always measured.
    file_suffix:       of the files of prepared data.
    default_tokenizer: the kind of tokenizer by default.
    text_columns:      the columns of a record that a tokenizer is trained on; none: all.
    """

    objective_name: ClassVar[str]
    kind: ClassVar[str] = ""
    inputs: ClassVar[str] = ""
    trainable: ClassVar[bool] = True
    predictor: ClassVar[Any] = Run
    reads: ClassVar[str] = "pairs"
    loss_metrics: ClassVar[tuple[str, ...]] = LOSS_METRICS
    answer_metrics: ClassVar[tuple[str, ...]] = ()
    default_metric: ClassVar[str] = "loss"
    file_suffix: ClassVar[str] = "arrow"
    default_tokenizer: ClassVar[str] = "bpe"
    text_columns: ClassVar[tuple[int, ...]] = ()

    def __init__(self, job: Job, settings: Settings, objective: dict[str, Any] | None = None):
        """objective: the recipe's [objective]; its entries besides `part` are kept as `objective_args`."""
        self.job, self.settings = job, settings
        self.objective_part = (objective or {}).get("part", self.objective_name)
        self.objective_args = {key: value for key, value in (objective or {}).items() if key != "part"}
        self.metrics: list[str] = []
        self.source: Tokenizer
        self.target: Tokenizer

    @classmethod
    def learns(cls, objective: Any) -> bool:
        """Return whether it is the task of recipes with this objective.part."""
        return cls.objective_name == objective

    def set_metrics(self, names: Sequence[str]) -> None:
        """Set the metrics to measure on the dev set, besides those of the loss; refuse unknown ones."""
        measures.check(names, (*self.loss_metrics, *self.answer_metrics))
        self.metrics = list(dict.fromkeys(name for name in names if name not in self.loss_metrics))

    def open(self, tick: Callable[[int], None]) -> Corpus:
        """Return the data of the job."""
        job = self.job
        return open_corpus(
            job.data, job.source, job.target, job.dev, job.test, job.columns, self.reads, job.bad_lines,
            self.settings.seed, tick=tick, header=job.header,
        )  # fmt: skip

    @property
    def tokenizers(self) -> list[Tokenizer]:
        """Return the tokenizers of source and target."""
        return [self.source, self.target]

    def tokens(self, row: Sequence[str]) -> int:
        """Return about how many tokens of a record the model reads."""
        return sum(len(one.encode([text])[0]) for one, text in zip(self.tokenizers, row, strict=False))

    def learn_tokenizers(self, corpus: Corpus, tick: Tick) -> None:
        """Train the tokenizers on the training split."""
        self.source = self.target = self.tokenizer(corpus, self.job.tokenizer or self.default_tokenizer, tick)

    def inherit_tokenizers(self, source: Tokenizer, target: Tokenizer, corpus: Corpus) -> None:
        """Take the tokenizers of the run that this one begins from."""
        self.source, self.target = source, target

    def tokenizer(self, corpus: Corpus, kind: str, tick: Tick, *columns: int) -> Tokenizer:
        if "," in kind:
            raise UserError(f"tokenizer '{kind}': two of them, with a comma between, are for a source and a target")
        if kind.endswith(".json"):
            return Tokenizer.load(kind)
        tick("learning the tokenizer", 0)
        return Tokenizer.train(kind, corpus.train.texts(*columns), self.job.vocab, self.job.lowercase)

    def complete_recipe(self, recipe: dict[str, Any]) -> None:
        """Fill in the entries of a recipe that depend on the data."""
        recipe["vocab"] = self.target.size if self.source is self.target else [self.source.size, self.target.size]

    def check_model(self, model: Model) -> None:
        """Refuse a model that cannot do this task."""

    def run_info(self) -> dict[str, Any]:
        """Return additional entries for run.json."""
        return {}

    def objective(self) -> Objective:
        return NextToken(self.settings.label_smoothing)

    def batches(self, model: Model, corpus: Corpus, say: Say, tick: Tick) -> Batches:
        raise NotImplementedError

    def dev(self, model: Model, lines: CorpusSplit) -> Dev:
        raise NotImplementedError

    def make_predictor(self, model: Model, folder: Path | None, documents: bool) -> Run | Reader:
        """Return an object that makes predictions with the model."""
        if self.predictor is Run:
            return Run(model, self.source, self.target, folder, documents)
        return self.predictor(model, self.source, self.target, folder)

    def data_path(self, name: str) -> Path:
        return Path(self.job.run) / "data" / name

    def coder(self, model: Model) -> Coder | None:
        """Return the encoder of records; None: one tokenizer per column."""
        return None

    def prepare(self, model: Model, lines: CorpusSplit, name: str, say: Say, tick: Tick) -> SequenceDataset:
        """Return the tokenized data, without examples that exceed a batch or the positions of the model."""
        most = min(self.job.longest or self.settings.batch_tokens, self.settings.batch_tokens)
        reach = model.source_limit if model.kind == "encoder-decoder" else model.limit
        limits, code = (min(most, reach or most), min(most, model.limit or most)), self.coder(model)
        longest = limits if code is None else limits[0]
        path, both = self.data_path(name), (self.source, self.target)
        data = prepare(lines, both, path, longest, partial(tick, "preparing"), code)
        check_patterns(model.encoder or model.stack, sorted(set(data.lengths[:, 0].tolist())))
        if data.left_out:
            most_of = " and ".join(str(n) for n in dict.fromkeys(limits))
            which = "one example is" if data.left_out == 1 else f"{data.left_out} examples are"
            say(f"{which} longer than {most_of} tokens and left out")
        return data
