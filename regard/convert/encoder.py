"""What families of encoders have in common: a body of layers, and the head that the architecture says."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, ClassVar

from regard.files import recipe

from . import sentences
from .family import Config, Family, dig
from .folder import Folder
from .rules import ACTIVATIONS, Key, Rule, both, same

OBJECTIVES: dict[str, dict[str, Any]] = {  # of a head that is not the recipe's own
    "pretrain": {"part": "masked", "next_sentence": True},
    "vocabulary": {"part": "masked"},
    "classify": {"part": "classify"},
    "tag": {"part": "tag"},
    "vectors": {"part": "embed"},
}
KINDS = {"embed": "vectors", "summary": "vectors", "none": "vectors", "regress": "classify"}  # of parts
MIXER, FEEDFORWARD = "model.layer.0.mixer", "model.layer.0.feedforward"
OLDER = {"weight": "gamma", "bias": "beta"}
EPS = ("model.layer.0.wiring.norm.eps", "model.embed.norm.eps")


class Encoder(Family):
    """A tensor of a head that the architecture lacks is left out (`ignored`), as their own classes do.

    heads:     architecture -> its head: pretrain, vocabulary, classify, tag or vectors (a bare model).
    inside:    what stands before the body's names when a head is there: "bert.".
    layer:     where the layers are, "{}" being the number.
    inner:     a layer's maps and norms: ours -> theirs.
    top:       those of the vocabulary's head: into, norm, table, bias.
    labels:    those of the head for labels: into, out; a name that begins with a dot belongs to the body.
    pair:      those of the head for pairs, where it has one.
    pooler:    the map of a bare model that sums up a sequence, where it has one.
    dropout:   entry of config.json for that before the labels; where it is silent, hidden_dropout_prob holds.
    """

    heads: ClassVar[dict[str, str]]
    inside: ClassVar[str]
    layer: ClassVar[str] = "encoder.layer.{}"
    inner: ClassVar[dict[str, str]] = {
        "branches.mixer.q": "attention.self.query", "branches.mixer.k": "attention.self.key",
        "branches.mixer.v": "attention.self.value", "branches.mixer.out": "attention.output.dense",
        "wiring.norms.0.inner": "attention.output.LayerNorm", "branches.feedforward.into": "intermediate.dense",
        "branches.feedforward.out": "output.dense", "wiring.norms.1.inner": "output.LayerNorm",
    }  # fmt: skip
    top: ClassVar[dict[str, str]] = {
        "into": "cls.predictions.transform.dense", "norm": "cls.predictions.transform.LayerNorm",
        "table": "cls.predictions.decoder", "bias": "cls.predictions.bias",
    }  # fmt: skip
    labels: ClassVar[dict[str, str]]
    pair: ClassVar[dict[str, str]] = {}
    pooler: ClassVar[str] = ""
    dropout: ClassVar[str] = "classifier_dropout"
    keys = (
        Key("vocab_size", "vocab"),
        Key("hidden_size", "model.width"),
        Key("num_hidden_layers", "model.depth"),
        Key("num_attention_heads", "model.heads"),
        Key("intermediate_size", f"{FEEDFORWARD}.hidden"),
        Key("hidden_act", f"{FEEDFORWARD}.activation", ACTIVATIONS),
        Key("hidden_dropout_prob", "model.dropout"),
        Key("attention_probs_dropout_prob", f"{MIXER}.weight_dropout"),
        Key("layer_norm_eps", EPS),
        Key("type_vocab_size", "model.embed.types"),
    )
    only = {
        "is_decoder": False,
        "add_cross_attention": False,
        "position_embedding_type": "absolute",
        "pruned_heads": {},
    }

    def head(self, config: Config) -> str:
        return self.heads[(config.get("architectures") or self.architectures)[0]]

    def tied(self, config: Config) -> bool:
        return config["tie_word_embeddings"] and self.head(config) in ("pretrain", "vocabulary")

    def recipe(self, config: Config) -> recipe.Recipe:
        made, kind = super().recipe(config), self.head(config)
        if kind != self.heads[self.architectures[0]]:
            made["objective"] = dict(OBJECTIVES[kind])
        model = made["model"]
        if not self.tied(config):
            del model["tie"]
        model["head"] = getattr(self, f"_{kind}")(config, model)
        if model["head"]["part"] == "regress":
            made["objective"] = {"part": "match"}
        pooled = config.get("sentence_transformers")
        if kind == "vectors" and pooled is not None:
            model["head"] = {
                "part": "embed",
                "pool": pooled["pool"],
                "normalize": pooled["normalize"],
                "over": model["head"],
            }
            if pooled.get("longest"):
                made["decode"] = {"max_source_tokens": pooled["longest"], "truncate": True}
        return made

    def _vocabulary(self, config: Config, model: dict[str, Any]) -> dict[str, Any]:
        hidden, norm = config.get("embedding_size") or model["width"], model["layer"][0]["wiring"]["norm"]
        made = {
            "part": "vocabulary",
            "hidden": hidden,
            "activation": self.activation_name(config, model),
            "norm": dict(norm),
        }
        spare = not config["tie_word_embeddings"] and "bias" in self.top
        return made | {"bias": True} | ({"spare": True} if spare else {})

    def _pretrain(self, config: Config, model: dict[str, Any]) -> dict[str, Any]:
        pair = {"part": "classify", "classes": self.pairs(config), "pool": "first", "hidden": model["width"]}
        return {"part": "pretrain", "tokens": self._vocabulary(config, model), "pair": pair}

    def _classify(self, config: Config, model: dict[str, Any]) -> dict[str, Any]:
        """A single label is a number: how well two texts fit."""
        several = {"part": "classify", "classes": labels(config)}
        made = {"part": "regress"} if labels(config) == 1 else several
        made |= {"pool": "first", "hidden": model["width"], "activation": self.label_bend(model)}
        return made | {"dropout": self._label_dropout(config)}

    def new_head(self, task: str, model: dict[str, Any]) -> dict[str, Any]:
        if task == "tag":
            return {}
        return {"pool": "first", "hidden": model["width"], "activation": self.label_bend(model)}

    def _tag(self, config: Config, model: dict[str, Any]) -> dict[str, Any]:
        return {"part": "tag", "classes": labels(config), "dropout": self._label_dropout(config)}

    def _vectors(self, config: Config, model: dict[str, Any]) -> dict[str, Any]:
        return {"part": "summary" if self.summed(config) else "none"}

    def summed(self, config: Config) -> bool:
        """Whether a bare model has its pooler."""
        return bool(self.pooler) and config.get("add_pooling_layer", True)

    def activation_name(self, config: Config, model: dict[str, Any]) -> str:
        """Of the layer before the vocabulary."""
        return model["layer"][0]["feedforward"]["activation"]

    def label_bend(self, model: dict[str, Any]) -> str:
        """Of the layer before the labels."""
        return "tanh"

    def pairs(self, config: Config) -> int:
        """Classes of pairs."""
        return 2

    def _label_dropout(self, config: Config) -> float:
        said = config.get(self.dropout)
        return config["hidden_dropout_prob"] if said is None else said

    def config(self, made: recipe.Recipe) -> Config:
        config, head = super().config(made), made["model"].get("head", "vocabulary")
        head = {"part": head} if isinstance(head, str) else head
        kind = KINDS.get(head["part"], head["part"])
        config["architectures"] = [next((a for a, known in self.heads.items() if known == kind), self.architectures[0])]
        config["tie_word_embeddings"] = made["model"].get("tie") == "target" or kind not in ("pretrain", "vocabulary")
        if kind in ("classify", "tag"):
            config["num_labels"] = head.get("classes", 1)
            dropout, usual = head.get("dropout", 0.0), config.get("hidden_dropout_prob")
            if dropout != usual or self.dropout in self.defaults:
                config[self.dropout] = dropout
        over = head.get("over", head["part"])
        if kind == "vectors" and self.pooler and over not in ("summary", {"part": "summary"}):
            config["add_pooling_layer"] = False
        if head["part"] == "embed":
            pooled = {"pool": head.get("pool", "mean"), "normalize": head.get("normalize", False)}
            config["sentence_transformers"] = pooled | {"longest": dig(made, "decode.max_source_tokens")}
        return config

    def seen(self, config: Config, names: Collection[str]) -> Config:
        """Which head there is, and whether a bare model has its pooler."""
        told: Config = {}
        if not names:
            return told
        said = self.heads.get((config.get("architectures") or [None])[0])
        alone = not any(name.startswith(self.inside) for name in names)
        pooled = f"{'' if alone else self.inside}{self.pooler}.weight" in names
        by_head = {head: name for name, head in reversed(self.heads.items())}
        if said in (None, "vocabulary") and self.pair and pooled and f"{self.pair['out']}.weight" in names:
            told["architectures"] = [by_head["pretrain"]]  # BERT's first checkpoints say otherwise
        elif said is None:
            said = "vectors" if alone else "vocabulary"
            told["architectures"] = [by_head[said]]
        return told if pooled or not self.pooler or said != "vectors" else told | {"add_pooling_layer": False}

    def beside(self, folder: Folder) -> Config:
        pooled = sentences.read(folder.path)
        return {} if pooled is None else {"sentence_transformers": pooled}

    def files(self, config: Config, told: dict[str, Any]) -> dict[str, Any]:
        if "sentence_transformers" not in config or told.get("origin"):  # what came with it goes back as it came
            return {}
        return sentences.files(config["sentence_transformers"], config["hidden_size"])

    def prefix(self, config: Config, names: Collection[str]) -> str:
        bare = self.head(config) == "vectors"
        inside = any(name.startswith(self.inside) for name in names) if names else not bare
        return self.inside if inside else ""

    def rules(self, config: Config, names: Collection[str]) -> Iterator[Rule]:
        at = self.prefix(config, names)
        for rule in (*self.embedding(config, at), *self.layers(config, at), *self.scores(config, at)):
            yield _older(rule, names)

    def embedding(self, config: Config, at: str) -> Iterator[Rule]:
        yield same("embed.table", f"{at}embeddings.word_embeddings.weight")
        yield same("embed.position.table", f"{at}embeddings.position_embeddings.weight")
        yield same("embed.segment_table", f"{at}embeddings.token_type_embeddings.weight")
        yield from both("embed.norm.inner", f"{at}embeddings.LayerNorm")

    def layers(self, config: Config, at: str) -> Iterator[Rule]:
        for i in range(config["num_hidden_layers"]):
            for ours, theirs in self.inner.items():
                yield from both(f"stack.layers.{i}.{ours}", f"{at}{self.layer.format(i)}.{theirs}")

    def scores(self, config: Config, at: str) -> Iterator[Rule]:
        """The head's."""
        kind = self.head(config)
        if kind in ("pretrain", "vocabulary"):
            yield from self._words(config, "head.tokens" if kind == "pretrain" else "head")
        if kind == "vectors" and self.summed(config):
            over = "head.over" if config.get("sentence_transformers") is not None else "head"
            yield from both(f"{over}.vector.out", f"{at}{self.pooler}")
        for name, there in {"pretrain": self.pair, "classify": self.labels}.get(kind, {}).items():
            own = f"head.pair.{name}" if kind == "pretrain" else f"head.{name}"
            yield from both(own, f"{at}{there[1:]}" if there.startswith(".") else there)
        if kind == "tag":
            yield from both("head.out", "classifier")

    def _words(self, config: Config, head: str) -> Iterator[Rule]:
        tied, table = self.tied(config), self.top["table"]
        yield from both(f"{head}.into", self.top["into"])
        yield from both(f"{head}.norm.inner", self.top["norm"])
        if not tied:
            yield same(f"{head}.table", f"{table}.weight")
        if "bias" not in self.top:
            yield same(f"{head}.bias", f"{table}.bias")
        elif tied:
            yield same(f"{head}.bias", self.top["bias"])
        else:
            yield same(f"{head}.bias", f"{table}.bias")
            yield same(f"{head}.spare", self.top["bias"])

    def aliases(self, config: Config) -> dict[str, str]:
        if not self.tied(config):
            return {}
        found = {f"{self.top['table']}.weight": f"{self.inside}embeddings.word_embeddings.weight"}
        return found | ({f"{self.top['table']}.bias": self.top["bias"]} if "bias" in self.top else {})


def labels(config: Config) -> int:
    """How many; two, where nothing is said."""
    return len(config["id2label"]) if config.get("id2label") else config.get("num_labels", 2)


def _older(rule: Rule, names: Collection[str]) -> Rule:
    """The first checkpoints called a norm's numbers gamma and beta."""
    stem, _, kind = rule.theirs.rpartition(".")
    old = f"{stem}.{OLDER.get(kind, kind)}"
    return Rule(rule.ours, old, rule.split, rule.join) if rule.theirs not in names and old in names else rule
