"""The base of encoder families: a body of layers, and the head that the architecture names."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, ClassVar

from regard.files import recipe

from . import sentences
from .family import Config, Family, get_path
from .folder import Folder
from .rules import ACTIVATIONS, Key, Rule, same, weight_and_bias

OBJECTIVES: dict[str, dict[str, Any]] = {  # kind of head -> objective, where the head is not the recipe's own
    "pretrain": {"part": "masked", "next_sentence": True},
    "vocabulary": {"part": "masked"},
    "classify": {"part": "classify"},
    "tag": {"part": "tag"},
    "vectors": {"part": "embed"},
}
KINDS = {"embed": "vectors", "summary": "vectors", "none": "vectors", "regress": "classify"}  # part -> kind of head
MIXER, FEEDFORWARD = "model.layer.0.mixer", "model.layer.0.feedforward"
OLD_NORM_NAMES = {"weight": "gamma", "bias": "beta"}
EPS = ("model.layer.0.wiring.norm.eps", "model.embed.norm.eps")


class Encoder(Family):
    """The base of encoder families. Tensors of a head that the architecture lacks are `ignored`, as transformers does.

    heads:            architecture -> kind of head: pretrain, vocabulary, classify, tag or vectors (a bare model).
    body_prefix:      prefix of the body's tensors in a model with a head, such as "bert.".
    layer:            name of a layer, with "{}" for its number.
    layer_names:      linear layers and norms of a layer: ours -> theirs.
    vocabulary_names: those of the masked-language-model head: into, norm, table, bias.
    classifier_names: those of the classification head: into, out; a name that begins with a dot belongs to the body.
    pair_names:       those of the next-sentence head, where there is one.
    pooler:           the linear layer of a bare model's pooler, where there is one.
    dropout:          entry of config.json for the classifier's dropout; where it is missing, hidden_dropout_prob holds.
    """

    heads: ClassVar[dict[str, str]]
    body_prefix: ClassVar[str]
    layer: ClassVar[str] = "encoder.layer.{}"
    layer_names: ClassVar[dict[str, str]] = {
        "branches.mixer.q": "attention.self.query", "branches.mixer.k": "attention.self.key",
        "branches.mixer.v": "attention.self.value", "branches.mixer.out": "attention.output.dense",
        "wiring.norms.0.inner": "attention.output.LayerNorm", "branches.feedforward.into": "intermediate.dense",
        "branches.feedforward.out": "output.dense", "wiring.norms.1.inner": "output.LayerNorm",
    }  # fmt: skip
    vocabulary_names: ClassVar[dict[str, str]] = {
        "into": "cls.predictions.transform.dense", "norm": "cls.predictions.transform.LayerNorm",
        "table": "cls.predictions.decoder", "bias": "cls.predictions.bias",
    }  # fmt: skip
    classifier_names: ClassVar[dict[str, str]]
    pair_names: ClassVar[dict[str, str]] = {}
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
    required_values = {
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
            "activation": self.vocabulary_activation(config, model),
            "norm": dict(norm),
        }
        spare = not config["tie_word_embeddings"] and "bias" in self.vocabulary_names
        return made | {"bias": True} | ({"spare": True} if spare else {})

    def _pretrain(self, config: Config, model: dict[str, Any]) -> dict[str, Any]:
        pair = {"part": "classify", "classes": self.pair_classes(config), "pool": "first", "hidden": model["width"]}
        return {"part": "pretrain", "tokens": self._vocabulary(config, model), "pair": pair}

    def _classify(self, config: Config, model: dict[str, Any]) -> dict[str, Any]:
        """Return the classification head; a single label means regression, such as the similarity of two texts."""
        several = {"part": "classify", "classes": label_count(config)}
        made = {"part": "regress"} if label_count(config) == 1 else several
        made |= {"pool": "first", "hidden": model["width"], "activation": self.classifier_activation(model)}
        return made | {"dropout": self._label_dropout(config)}

    def new_head(self, task: str, model: dict[str, Any]) -> dict[str, Any]:
        if task == "tag":
            return {}
        return {"pool": "first", "hidden": model["width"], "activation": self.classifier_activation(model)}

    def _tag(self, config: Config, model: dict[str, Any]) -> dict[str, Any]:
        return {"part": "tag", "classes": label_count(config), "dropout": self._label_dropout(config)}

    def _vectors(self, config: Config, model: dict[str, Any]) -> dict[str, Any]:
        return {"part": "summary" if self.has_pooler(config) else "none"}

    def has_pooler(self, config: Config) -> bool:
        """Return whether a bare model has a pooler."""
        return bool(self.pooler) and config.get("add_pooling_layer", True)

    def vocabulary_activation(self, config: Config, model: dict[str, Any]) -> str:
        """Return the activation of the layer before the vocabulary."""
        return model["layer"][0]["feedforward"]["activation"]

    def classifier_activation(self, model: dict[str, Any]) -> str:
        """Return the activation of the layer before the labels."""
        return "tanh"

    def pair_classes(self, config: Config) -> int:
        """Return the number of classes of the next-sentence head."""
        return 2

    def _label_dropout(self, config: Config) -> float:
        found = config.get(self.dropout)
        return config["hidden_dropout_prob"] if found is None else found

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
            config["sentence_transformers"] = pooled | {"longest": get_path(made, "decode.max_source_tokens")}
        return config

    def config_from_tensors(self, config: Config, names: Collection[str]) -> Config:
        """Return which head there is, and whether a bare model has a pooler."""
        extra: Config = {}
        if not names:
            return extra
        found = self.heads.get((config.get("architectures") or [None])[0])
        alone = not any(name.startswith(self.body_prefix) for name in names)
        pooled = f"{'' if alone else self.body_prefix}{self.pooler}.weight" in names
        by_head = {head: name for name, head in reversed(self.heads.items())}
        if found in (None, "vocabulary") and self.pair_names and pooled and f"{self.pair_names['out']}.weight" in names:
            extra["architectures"] = [by_head["pretrain"]]  # BERT's first checkpoints say otherwise
        elif found is None:
            found = "vectors" if alone else "vocabulary"
            extra["architectures"] = [by_head[found]]
        return extra if pooled or not self.pooler or found != "vectors" else extra | {"add_pooling_layer": False}

    def config_from_files(self, folder: Folder) -> Config:
        pooled = sentences.read(folder.path)
        return {} if pooled is None else {"sentence_transformers": pooled}

    def files(self, config: Config, run_info: dict[str, Any]) -> dict[str, Any]:
        if "sentence_transformers" not in config or run_info.get("origin"):  # what came with it goes back as it came
            return {}
        return sentences.files(config["sentence_transformers"], config["hidden_size"])

    def prefix(self, config: Config, names: Collection[str]) -> str:
        bare = self.head(config) == "vectors"
        inside = any(name.startswith(self.body_prefix) for name in names) if names else not bare
        return self.body_prefix if inside else ""

    def rules(self, config: Config, names: Collection[str]) -> Iterator[Rule]:
        at = self.prefix(config, names)
        for rule in (*self.embedding(config, at), *self.layers(config, at), *self.head_rules(config, at)):
            yield _with_old_norm_names(rule, names)

    def embedding(self, config: Config, at: str) -> Iterator[Rule]:
        yield same("embed.table", f"{at}embeddings.word_embeddings.weight")
        yield same("embed.position.table", f"{at}embeddings.position_embeddings.weight")
        yield same("embed.segment_table", f"{at}embeddings.token_type_embeddings.weight")
        yield from weight_and_bias("embed.norm.inner", f"{at}embeddings.LayerNorm")

    def layers(self, config: Config, at: str) -> Iterator[Rule]:
        for i in range(config["num_hidden_layers"]):
            for ours, theirs in self.layer_names.items():
                yield from weight_and_bias(f"stack.layers.{i}.{ours}", f"{at}{self.layer.format(i)}.{theirs}")

    def head_rules(self, config: Config, at: str) -> Iterator[Rule]:
        """Yield the rules of the head."""
        kind = self.head(config)
        if kind in ("pretrain", "vocabulary"):
            yield from self._vocabulary_rules(config, "head.tokens" if kind == "pretrain" else "head")
        if kind == "vectors" and self.has_pooler(config):
            over = "head.over" if config.get("sentence_transformers") is not None else "head"
            yield from weight_and_bias(f"{over}.vector.out", f"{at}{self.pooler}")
        for name, there in {"pretrain": self.pair_names, "classify": self.classifier_names}.get(kind, {}).items():
            own = f"head.pair.{name}" if kind == "pretrain" else f"head.{name}"
            yield from weight_and_bias(own, f"{at}{there[1:]}" if there.startswith(".") else there)
        if kind == "tag":
            yield from weight_and_bias("head.out", "classifier")

    def _vocabulary_rules(self, config: Config, head: str) -> Iterator[Rule]:
        tied, table = self.tied(config), self.vocabulary_names["table"]
        yield from weight_and_bias(f"{head}.into", self.vocabulary_names["into"])
        yield from weight_and_bias(f"{head}.norm.inner", self.vocabulary_names["norm"])
        if not tied:
            yield same(f"{head}.table", f"{table}.weight")
        if "bias" not in self.vocabulary_names:
            yield same(f"{head}.bias", f"{table}.bias")
        elif tied:
            yield same(f"{head}.bias", self.vocabulary_names["bias"])
        else:
            yield same(f"{head}.bias", f"{table}.bias")
            yield same(f"{head}.spare", self.vocabulary_names["bias"])

    def aliases(self, config: Config) -> dict[str, str]:
        if not self.tied(config):
            return {}
        found = {f"{self.vocabulary_names['table']}.weight": f"{self.body_prefix}embeddings.word_embeddings.weight"}
        return found | (
            {f"{self.vocabulary_names['table']}.bias": self.vocabulary_names["bias"]}
            if "bias" in self.vocabulary_names
            else {}
        )


def label_count(config: Config) -> int:
    """Return the number of labels, by default two."""
    return len(config["id2label"]) if config.get("id2label") else config.get("num_labels", 2)


def _with_old_norm_names(rule: Rule, names: Collection[str]) -> Rule:
    """Return the rule with the norm's old names gamma and beta, where the checkpoint has those."""
    stem, _, kind = rule.theirs.rpartition(".")
    old = f"{stem}.{OLD_NORM_NAMES.get(kind, kind)}"
    return Rule(rule.ours, old, rule.split, rule.join) if rule.theirs not in names and old in names else rule
