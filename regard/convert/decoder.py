"""What families of decoders have in common: a language model, a classifier that is asked at the end of a text, or a
bare model that ends before the head."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, ClassVar

from regard.core import UserError
from regard.files.recipe import Recipe

from .encoder import labels
from .family import Config, Family, dig
from .rules import Rule, same

CLASSIFIER = "ForSequenceClassification"
OBJECTIVES = {"classify": "classify", "none": "embed"}


class Decoder(Family):
    """architectures: the language model first, the bare model last.

    inside:     what stands before the bare model's names when a head is there: "model.".
    table:      the embedding's, in the bare model.
    """

    inside: ClassVar[str]
    table: ClassVar[str]

    def kind(self, config: Config) -> str:
        """Of its head: vocabulary, classify or none."""
        name = (config.get("architectures") or self.architectures)[0]
        return "none" if name == self.architectures[-1] else "classify" if name.endswith(CLASSIFIER) else "vocabulary"

    def tied(self, config: Config) -> bool:
        return config["tie_word_embeddings"] and self.kind(config) == "vocabulary"

    def prefix(self, config: Config, names: Collection[str]) -> str:
        """Some checkpoints of a language model are named as those of a bare one."""
        bare = self.table in names if names else self.kind(config) == "none"
        return "" if bare else self.inside

    def seen(self, config: Config, names: Collection[str]) -> Config:
        """A config.json that does not say its class: bare, if there is no head and nothing to tie it to."""
        told = config.get("architectures") or config.get("tie_word_embeddings", self.defaults["tie_word_embeddings"])
        bare = not told and self.table in names and "lm_head.weight" not in names
        return {"architectures": [self.architectures[-1]]} if bare else {}

    def top(self, config: Config) -> Iterator[Rule]:
        """The head's tensors."""
        kind = self.kind(config)
        if kind == "classify":
            yield same("head.out.weight", "score.weight")
        elif kind == "vocabulary" and not self.tied(config):
            yield same("head.table", "lm_head.weight")

    def aliases(self, config: Config) -> dict[str, str]:
        return {"lm_head.weight": f"{self.inside}{self.table}"} if self.tied(config) else {}

    def new_head(self, task: str, model: Config) -> Config:
        return {"pool": "last", "bias": False}

    def recipe(self, config: Config) -> Recipe:
        made, kind = super().recipe(config), self.kind(config)
        if kind != "vocabulary":
            del made["model"]["tie"]  # there is nothing to tie
            made["model"]["head"] = _classify(config) if kind == "classify" else "none"
            made["objective"] = {"part": OBJECTIVES[kind]}
        return made

    def config(self, made: Recipe) -> Config:
        head = made["model"].get("head", "vocabulary")
        part = head if isinstance(head, str) else head["part"]
        config = super().config({**made, "model": {"tie": "none"} | made["model"]})
        if part in OBJECTIVES:
            del config["tie_word_embeddings"]
            wanted = CLASSIFIER if part == "classify" else self.architectures[-1]
            config["architectures"] = [next(name for name in self.architectures if name.endswith(wanted))]
        return config | ({"num_labels": dig(head, "classes")} if part == "classify" else {})


def _classify(config: Config) -> dict[str, Any]:
    if labels(config) < 2:
        raise UserError("config.json says one label; regard reads a classifier with two or more")
    return {"part": "classify", "classes": labels(config), "pool": "last", "bias": False}
