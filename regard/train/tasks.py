"""What a run learns from: how its corpus becomes tokens and batches, and how good its model is on the dev set.

Pairs    source and target, an encoder-decoder
Text     a text that goes on, a decoder
Labels   texts with a label each, an encoder
GraphNodes  a graph whose nodes have classes, an encoder
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from regard import metrics as measures
from regard.core import Model, UserError
from regard.data import (
    Batches,
    Bucketed,
    Corpus,
    Labelled,
    Lines,
    Sequences,
    Tokenizer,
    Windows,
    once,
    open_corpus,
    prepare,
    prepare_text,
)  # fmt: skip
from regard.data.graph import open_graph
from regard.evaluate import gather
from regard.label import Labeller
from regard.nodes import NodeLabeller
from regard.run import Run

from .checkpoint import put
from .dev import FORCED, Dev, windows
from .learner import Objective
from .objectives.classify import Classify
from .objectives.next_token import NextToken
from .objectives.nodes import Nodes, measured
from .settings import Settings

if TYPE_CHECKING:
    from .job import Job

DEV_TOKENS = 8192  # of a dev batch

Say = Callable[[str], None]
Tick = Callable[[str, int], None]


def silent(sentence: str) -> None:
    """Nobody listens."""


def unseen(what: str, done: int) -> None:
    """Nobody watches."""


class Task:
    """reads:   what a record of the corpus is, for open_corpus.
    forced:     metrics that are always measured.
    answered:   metrics of the model's own answers, which can be asked for.
    files:      what is prepared for it ends so.
    usual:      tokenizer.
    """

    reads: ClassVar[str] = "pairs"
    forced: ClassVar[tuple[str, ...]] = FORCED
    answered: ClassVar[tuple[str, ...]] = ()
    files: ClassVar[str] = "arrow"
    usual: ClassVar[str] = "bpe"

    def __init__(self, job: Job, settings: Settings):
        self.job, self.settings = job, settings
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
            self.settings.seed, tick=tick,
        )  # fmt: skip

    @property
    def tokenizers(self) -> list[Tokenizer]:
        """The source's and the target's."""
        return [self.source, self.target]

    def learn(self, corpus: Corpus, tick: Tick) -> None:
        """Tokenizers, from the training part."""
        self.source = self.target = self.tokenizer(corpus, self.job.tokenizer or self.usual, tick)

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

    def objective(self) -> Objective:
        return NextToken(self.settings.smoothing)

    def batches(self, model: Model, corpus: Corpus, say: Say, tick: Tick) -> Batches:
        raise NotImplementedError

    def dev(self, model: Model, lines: Lines) -> Dev:
        raise NotImplementedError

    def run(self, model: Model, folder: Path | None, documents: bool) -> Run | Labeller:
        """The model, ready to be used."""
        return Run(model, self.source, self.target, folder, documents)

    def data(self, name: str) -> Path:
        return Path(self.job.run) / "data" / name

    def prepare(self, model: Model, lines: Lines, name: str, say: Say, tick: Tick) -> Sequences:
        """Sequences no longer than what fits a batch, and what the positions reach."""
        most = min(self.job.longest or self.settings.batch, self.settings.batch)
        limits = min(most, model.source_limit or most), min(most, model.limit or most)
        data = prepare(lines, (self.source, self.target), self.data(name), limits, partial(tick, "preparing"))
        if data.left_out:
            most_of = " and ".join(str(n) for n in dict.fromkeys(limits))
            say(f"{data.left_out} examples are longer than {most_of} tokens and are left out")
        return data


class Pairs(Task):
    answered = measures.KNOWN

    def learn(self, corpus: Corpus, tick: Tick) -> None:
        kinds = (self.job.tokenizer or self.usual).split(",")
        if len(kinds) == 1:
            return super().learn(corpus, tick)
        if len(kinds) > 2:
            raise UserError(
                f"tokenizer '{self.job.tokenizer}': one for both sides, or two with a comma between, not {len(kinds)}"
            )
        self.source, self.target = (self.tokenizer(corpus, kind, tick, side) for side, kind in enumerate(kinds))

    def batches(self, model: Model, corpus: Corpus, say: Say, tick: Tick) -> Batches:
        s, data = self.settings, self.prepare(model, corpus.train, "train.arrow", say, tick)
        return Bucketed(data, s.batch, s.seed, self.target.start, self.target.pad)

    def dev(self, model: Model, lines: Lines) -> Dev:
        s, data = self.settings, self.prepare(model, lines, "dev.arrow", silent, unseen)
        batches = Bucketed(data, max(s.batch, DEV_TOKENS), s.seed, self.target.start, self.target.pad, shuffle=False)
        asked = gather(lines, self.job.any_reference, self.job.dev_most) if self.metrics else ((), ())
        return Dev(self.objective(), lambda: once(batches), self.run, self.forced, self.metrics, *asked)


class Text(Task):
    reads = "text"
    files = "ids"
    usual = "characters"

    def ask(self, names: Sequence[str]) -> None:
        measures.check(names, (*self.forced, *measures.KNOWN))
        for name in names:
            if name not in self.forced:
                raise UserError(f"'{name}' wants right answers, and a language model has none: say loss")

    def fit(self, model: Model) -> None:
        context = self.settings.context
        if model.limit is not None and context > model.limit:
            raise UserError(f"train.context is {context}, and the positions of this model reach only {model.limit}")

    def batches(self, model: Model, corpus: Corpus, say: Say, tick: Tick) -> Batches:
        s = self.settings
        stream = prepare_text(corpus.train, self.target, self.data("train.ids"), partial(tick, "preparing"))
        return Windows(stream, s.context, s.rows or max(s.batch // s.context, 1), s.seed)

    def dev(self, model: Model, lines: Lines) -> Dev:
        context, pad = self.settings.context, self.target.pad
        text = prepare_text(lines, self.target, self.data("dev.ids"))
        before = Run(model, self.source, self.target, documents=lines.documents).opening[-1]
        rows = max(DEV_TOKENS // context, 1)
        return Dev(self.objective(), lambda: windows(text, before, context, rows, pad), self.run)


class Labels(Task):
    forced = ("loss",)
    answered = ("accuracy", "f1")

    def ask(self, names: Sequence[str]) -> None:
        super().ask([*names, "accuracy"])

    def learn(self, corpus: Corpus, tick: Tick) -> None:
        self.source = self.tokenizer(corpus, self.job.tokenizer or self.usual, tick, 0)
        self.target = Tokenizer.of_labels(corpus.train.texts(1))

    def complete(self, recipe: dict[str, Any]) -> None:
        recipe["vocab"] = self.source.size
        head = recipe["model"].get("head", "classify")
        recipe["model"]["head"] = ({"part": head} if isinstance(head, str) else head) | {"classes": self.target.labels}

    def objective(self) -> Objective:
        return Classify(self.settings.smoothing)

    def batches(self, model: Model, corpus: Corpus, say: Say, tick: Tick) -> Batches:
        s, data = self.settings, self.prepare(model, corpus.train, "train.arrow", say, tick)
        return Labelled(data, s.batch, s.seed, self.source.pad)

    def dev(self, model: Model, lines: Lines) -> Dev:
        known = self.target.inner.get_vocab()
        for label in lines.texts(1):
            if label.strip() not in known:
                raise UserError(f"{lines.name}: the label '{label.strip()}' stands nowhere in the training data")
        s, data = self.settings, self.prepare(model, lines, "dev.arrow", silent, unseen)
        batches = Labelled(data, max(s.batch, DEV_TOKENS), s.seed, self.source.pad, shuffle=False)
        asked = gather(lines, False)
        return Dev(self.objective(), lambda: once(batches), self.run, self.forced, self.metrics, *asked)

    def run(self, model: Model, folder: Path | None, documents: bool) -> Labeller:
        return Labeller(model, self.source, self.target, folder)


class GraphNodes(Task):
    reads = "graph"
    forced = ("loss", "accuracy")
    files = "graph"

    @property
    def tokenizers(self) -> list[Tokenizer]:
        return []

    def open(self, tick: Callable[[int], None]) -> Any:
        job = self.job
        for name in ("source", "target", "dev", "test", "columns", "tokenizer"):
            if getattr(job, name) is not None:
                raise UserError(f"a graph says by itself what is what, so there is no {name} to give")
        if job.data is None:
            raise UserError("which graph? Give data=, an .npz file or a folder with one")
        self.graph = open_graph(job.data)
        return self.graph

    def learn(self, corpus: Corpus, tick: Tick) -> None:
        """A graph has no tokens."""

    def complete(self, recipe: dict[str, Any]) -> None:
        recipe["vocab"] = self.graph.channels
        head = recipe["model"].get("head", "tag")
        recipe["model"]["head"] = ({"part": head} if isinstance(head, str) else head) | {"classes": self.graph.classes}

    def objective(self) -> Objective:
        return Nodes(self.settings.smoothing)

    def batches(self, model: Model, corpus: Any, say: Say, tick: Tick) -> Any:
        return self._noted(corpus.train, "train.graph")

    def dev(self, model: Model, lines: Any) -> Any:
        batch = self._noted(lines, "dev.graph").batch.to(next(model.parameters()).device)
        return lambda model: measured(model, batch)

    def _noted(self, nodes: Any, name: str) -> Any:
        """What is seen and asked is the same in a run that goes on."""
        self.data("").mkdir(parents=True, exist_ok=True)
        put(self.data(name), nodes.digest())
        return nodes

    def run(self, model: Model, folder: Path | None, documents: bool) -> Any:
        return NodeLabeller(model, folder)


def task_of(recipe: dict[str, Any], name: str) -> type[Task]:
    """By the recipe's objective and kind."""
    objective, kind = recipe.get("objective", {}).get("part", "next_token"), recipe["model"].get("kind")
    if objective == "classify":
        return Labels
    if objective == "nodes":
        return GraphNodes
    if objective != "next_token" or kind == "encoder":
        raise UserError(f"recipe '{name}' has the objective '{objective}', which cannot be trained yet")
    return Pairs if kind == "encoder-decoder" else Text
