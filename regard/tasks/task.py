"""What every task shares: how its corpus becomes tokens and batches, and how good its model is on the dev set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from regard import metrics as measures
from regard.core import Model, Pattern, Stack, UserError
from regard.data import Batches, Corpus, Lines, Sequences, Tokenizer, open_corpus, prepare
from regard.data.prepare import Coder
from regard.parts.objectives.next_token import NextToken
from regard.parts.objectives.objective import Objective
from regard.pattern.analysis import first_blind_query
from regard.runs.job import Job
from regard.runs.settings import Settings

from .dev import FORCED, Dev
from .reader import Reader
from .run import Run

DEV_TOKENS = 8192  # of a dev batch

Say = Callable[[str], None]
Tick = Callable[[str, int], None]


def silent(sentence: str) -> None:
    """Nobody listens."""


def unseen(what: str, done: int) -> None:
    """Nobody watches."""


def check_patterns(stack: Stack, lengths: Sequence[int]) -> None:
    """Refuse, by name, a pattern that leaves a position of sequences of these lengths with nothing to see."""
    for index, layer in enumerate(list(stack.layers)[: stack.kinds]):
        for name, mixer in layer.branches.items():  # type: ignore[union-attr, operator]
            pattern = getattr(mixer, "pattern", None)
            if not isinstance(pattern, Pattern) or not pattern.fixed or getattr(mixer, "over", "self") != "self":
                continue
            for length in lengths:
                lost = first_blind_query(pattern, length)
                if lost is not None:
                    raise UserError(
                        f"pattern '{pattern}' leaves position {lost} of a sequence of {length} with nothing to "
                        "see: add, say, '| window(1)'",
                        ("layer", f"[{index}]", name),
                    )


class Task:
    """A job that a model is trained for and then does. A subclass that names what it `learns` is found by that.

    learns:     the objective.part of the recipes that it is for.
    kind:       the kind of model that it is for; empty: any.
    inputs:     what the embed of the model reads, where that decides: images; empty: anything.
    trains:     whether there is a way to train it here; else its models come from elsewhere.
    predictor:  the class that answers with a trained model.
    reads:      what a record of the corpus is, for open_corpus.
    forced:     metrics that are always measured.
    answered:   metrics of the model's own answers, which can be asked for.
    decisive:   the metric that tells which model is the best, where nothing is said; always measured.
    files:      what is prepared for it ends so.
    usual:      tokenizer.
    texts:      the columns of a record that a tokenizer is learned from; none: all.
    """

    learns: ClassVar[str]
    kind: ClassVar[str] = ""
    inputs: ClassVar[str] = ""
    trains: ClassVar[bool] = True
    predictor: ClassVar[Any] = Run
    reads: ClassVar[str] = "pairs"
    forced: ClassVar[tuple[str, ...]] = FORCED
    answered: ClassVar[tuple[str, ...]] = ()
    decisive: ClassVar[str] = "loss"
    files: ClassVar[str] = "arrow"
    usual: ClassVar[str] = "bpe"
    texts: ClassVar[tuple[int, ...]] = ()

    def __init__(self, job: Job, settings: Settings, objective: dict[str, Any] | None = None):
        """objective: the recipe's [objective]; what it says besides its part is kept as `own`."""
        self.job, self.settings = job, settings
        self.own = {key: value for key, value in (objective or {}).items() if key != "part"}
        self.metrics: list[str] = []
        self.source: Tokenizer
        self.target: Tokenizer

    def ask(self, names: Sequence[str]) -> None:
        """For metrics, the one that decides what is best among them."""
        measures.check(names, (*self.forced, *self.answered))
        self.metrics = list(dict.fromkeys(name for name in names if name not in self.forced))

    def open(self, tick: Callable[[int], None]) -> Corpus:
        """What there is to learn from."""
        job = self.job
        return open_corpus(
            job.data, job.source, job.target, job.dev, job.test, job.columns, self.reads, job.bad_lines,
            self.settings.seed, tick=tick, header=job.header,
        )  # fmt: skip

    @property
    def tokenizers(self) -> list[Tokenizer]:
        """The source's and the target's."""
        return [self.source, self.target]

    def tokens(self, row: Sequence[str]) -> int:
        """Return how many tokens of a record the model reads, about."""
        return sum(len(one.encode([text])[0]) for one, text in zip(self.tokenizers, row, strict=False))

    def learn(self, corpus: Corpus, tick: Tick) -> None:
        """Tokenizers, from the training part."""
        self.source = self.target = self.tokenizer(corpus, self.job.tokenizer or self.usual, tick)

    def inherit(self, source: Tokenizer, target: Tokenizer, corpus: Corpus) -> None:
        """Tokenizers of the run that this one begins from, instead."""
        self.source, self.target = source, target

    def tokenizer(self, corpus: Corpus, kind: str, tick: Tick, *columns: int) -> Tokenizer:
        if "," in kind:
            raise UserError(f"tokenizer '{kind}': two of them, with a comma between, are for a source and a target")
        if kind.endswith(".json"):
            return Tokenizer.load(kind)
        tick("learning the tokenizer", 0)
        return Tokenizer.train(kind, corpus.train.texts(*columns), self.job.vocab, self.job.lowercase)

    def complete(self, recipe: dict[str, Any]) -> None:
        """What only the data could tell."""
        recipe["vocab"] = self.target.size if self.source is self.target else [self.source.size, self.target.size]

    def fit(self, model: Model) -> None:
        """Refuses a model that cannot do it."""

    def about(self) -> dict[str, Any]:
        """What run.json should tell, besides."""
        return {}

    def objective(self) -> Objective:
        return NextToken(self.settings.label_smoothing)

    def batches(self, model: Model, corpus: Corpus, say: Say, tick: Tick) -> Batches:
        raise NotImplementedError

    def dev(self, model: Model, lines: Lines) -> Dev:
        raise NotImplementedError

    def run(self, model: Model, folder: Path | None, documents: bool) -> Run | Reader:
        """Return the model, ready to be used."""
        if self.predictor is Run:
            return Run(model, self.source, self.target, folder, documents)
        return self.predictor(model, self.source, self.target, folder)

    def data(self, name: str) -> Path:
        return Path(self.job.run) / "data" / name

    def coder(self, model: Model) -> Coder | None:
        """How records become tokens; None: one tokenizer a column."""
        return None

    def prepare(self, model: Model, lines: Lines, name: str, say: Say, tick: Tick) -> Sequences:
        """Sequences no longer than what fits a batch, and what the positions reach."""
        most = min(self.job.longest or self.settings.batch_tokens, self.settings.batch_tokens)
        reach = model.source_limit if model.kind == "encoder-decoder" else model.limit
        limits, code = (min(most, reach or most), min(most, model.limit or most)), self.coder(model)
        longest = limits if code is None else limits[0]
        path, both = self.data(name), (self.source, self.target)
        data = prepare(lines, both, path, longest, partial(tick, "preparing"), code)
        check_patterns(model.encoder or model.stack, sorted(set(data.lengths[:, 0].tolist())))
        if data.left_out:
            most_of = " and ".join(str(n) for n in dict.fromkeys(limits))
            which = "one example is" if data.left_out == 1 else f"{data.left_out} examples are"
            say(f"{which} longer than {most_of} tokens and left out")
        return data
