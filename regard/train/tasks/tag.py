"""Sentences whose words have a tag each: an encoder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from regard.core import Model
from regard.data import Batches, Corpus, Lines, Sequences
from regard.data.conll import TagCoder, Tagged
from regard.parts.objectives.nodes import Nodes
from regard.parts.objectives.objective import Objective
from regard.use.tag import Tagger

from .labels import Labels


class Tags(Labels):
    reads = "tags"
    answered = ("tag_accuracy", "span_f1")
    always = ("tag_accuracy",)

    def check_header(self, corpus: Corpus) -> None:
        """A word a line has no header, and whole sentences have as many tags as words."""

    def check_labels(self, corpus: Corpus) -> None:
        """Tags are of words, which are many."""

    def labels(self, lines: Lines) -> Iterable[str]:
        return {tag for _, tags in lines for tag in tags.split(" ")}

    def objective(self) -> Objective:
        return Nodes(self.settings.label_smoothing)

    def coder(self, model: Model) -> TagCoder:
        return TagCoder(self.source, self.target)

    def sized(self, data: Sequences, budget: int, shuffle: bool = True) -> Batches:
        s = self.settings
        return Tagged(data, budget, s.seed, self.source.pad, shuffle, s.batch_size * shuffle)  # type: ignore[return-value]

    def run(self, model: Model, folder: Path | None, documents: bool) -> Tagger:
        return Tagger(model, self.source, self.target, folder)
