"""DistilBERT: BERT without segments, under other names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from regard.convert.encoder import FEEDFORWARD, MIXER, Encoder
from regard.convert.family import Config
from regard.convert.rules import ACTIVATIONS, Key, Rule, same, weight_and_bias


class Distilbert(Encoder):
    recipe_name = "distilbert"
    model_type = "distilbert"
    heads = {
        "DistilBertForMaskedLM": "vocabulary", "DistilBertModel": "vectors",
        "DistilBertForSequenceClassification": "classify", "DistilBertForTokenClassification": "tag",
    }  # fmt: skip
    architectures = tuple(heads)
    body_prefix = "distilbert."
    layer = "transformer.layer.{}"
    layer_names = {
        "branches.mixer.q": "attention.q_lin", "branches.mixer.k": "attention.k_lin",
        "branches.mixer.v": "attention.v_lin", "branches.mixer.out": "attention.out_lin",
        "wiring.norms.0.inner": "sa_layer_norm", "branches.feedforward.into": "ffn.lin1",
        "branches.feedforward.out": "ffn.lin2", "wiring.norms.1.inner": "output_layer_norm",
    }  # fmt: skip
    vocabulary_names = {"into": "vocab_transform", "norm": "vocab_layer_norm", "table": "vocab_projector"}
    classifier_names = {"into": "pre_classifier", "out": "classifier"}
    dropout = "seq_classif_dropout"
    defaults = {
        "vocab_size": 30522, "max_position_embeddings": 512, "n_layers": 6, "n_heads": 12, "dim": 768,
        "hidden_dim": 3072, "dropout": 0.1, "attention_dropout": 0.1, "activation": "gelu", "seq_classif_dropout": 0.2,
        "tie_word_embeddings": True,
    }  # fmt: skip
    keys = (
        Key("vocab_size", "vocab"),
        Key("dim", "model.width"),
        Key("n_layers", "model.depth"),
        Key("n_heads", "model.heads"),
        Key("hidden_dim", f"{FEEDFORWARD}.hidden"),
        Key("activation", f"{FEEDFORWARD}.activation", ACTIVATIONS),
        Key("dropout", "model.dropout"),
        Key("attention_dropout", f"{MIXER}.weight_dropout"),
        Key("max_position_embeddings", "model.embed.position.length"),
    )
    ignored = (r"embeddings\.position_ids$", r"^vocab_")

    def classifier_activation(self, model: dict[str, Any]) -> str:
        return "relu"

    def embedding(self, config: Config, at: str) -> Iterator[Rule]:
        yield same("embed.table", f"{at}embeddings.word_embeddings.weight")
        yield same("embed.position.table", f"{at}embeddings.position_embeddings.weight")
        yield from weight_and_bias("embed.norm.inner", f"{at}embeddings.LayerNorm")

    def layers(self, config: Config, at: str) -> Iterator[Rule]:
        return super().layers({"num_hidden_layers": config["n_layers"]}, at)
