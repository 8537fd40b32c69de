"""The base of decoder families: a language model, a classifier on the last token, or a bare model without a head."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, ClassVar

from regard.core import UserError
from regard.files.recipe import Recipe

from .encoder import label_count
from .family import Config, Family, get_path
from .rules import Rule, same

CLASSIFIER = "ForSequenceClassification"
OBJECTIVES = {"classify": "classify", "none": "embed"}


class Decoder(Family):
    """The base of decoder families. In `architectures`, the language model comes first and the bare model last.

    body_prefix: prefix of the body's tensors in a model with a head, such as "model.".
    table:       name of the embedding table in the bare model.
    """

    body_prefix: ClassVar[str]
    table: ClassVar[str]

    def kind(self, config: Config) -> str:
        """Return the kind of the head: vocabulary, classify or none."""
        name = (config.get("architectures") or self.architectures)[0]
        return "none" if name == self.architectures[-1] else "classify" if name.endswith(CLASSIFIER) else "vocabulary"

    def tied(self, config: Config) -> bool:
        return config["tie_word_embeddings"] and self.kind(config) == "vocabulary"

    def prefix(self, config: Config, names: Collection[str]) -> str:
        """Return the prefix of the body's tensors. Some checkpoints of language models lack it, as a bare model
        does."""
        bare = self.table in names if names else self.kind(config) == "none"
        return "" if bare else self.body_prefix

    def config_from_tensors(self, config: Config, names: Collection[str]) -> Config:
        """Return the bare architecture where config.json names none and there is neither a head nor a tied one."""
        named = config.get("architectures") or config.get("tie_word_embeddings", self.defaults["tie_word_embeddings"])
        bare = not named and self.table in names and "lm_head.weight" not in names
        return {"architectures": [self.architectures[-1]]} if bare else {}

    def head_rules(self, config: Config) -> Iterator[Rule]:
        """Yield the rules of the head."""
        kind = self.kind(config)
        if kind == "classify":
            yield same("head.out.weight", "score.weight")
        elif kind == "vocabulary" and not self.tied(config):
            yield same("head.table", "lm_head.weight")

    def aliases(self, config: Config) -> dict[str, str]:
        return {"lm_head.weight": f"{self.body_prefix}{self.table}"} if self.tied(config) else {}

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
        return config | ({"num_labels": get_path(head, "classes")} if part == "classify" else {})


def _classify(config: Config) -> dict[str, Any]:
    if label_count(config) < 2:
        raise UserError("config.json says one label; regard reads a classifier with two or more")
    return {"part": "classify", "classes": label_count(config), "pool": "last", "bias": False}
