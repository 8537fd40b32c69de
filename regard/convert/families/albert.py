"""ALBERT: all layers share one layer's weights, and a narrow embedding is projected to the width."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from regard.convert.encoder import Encoder, label_count
from regard.convert.family import Config
from regard.convert.rules import Key, Rule, weight_and_bias
from regard.core import UserError
from regard.files import recipe


class Albert(Encoder):
    recipe_name = "albert"
    model_type = "albert"
    heads = {
        "AlbertForMaskedLM": "vocabulary", "AlbertForPreTraining": "pretrain", "AlbertModel": "vectors",
        "AlbertForSequenceClassification": "classify", "AlbertForTokenClassification": "tag",
    }  # fmt: skip
    architectures = tuple(heads)
    body_prefix = "albert."
    layer = "encoder.albert_layer_groups.0.albert_layers.{}"
    layer_names = {
        "branches.mixer.q": "attention.query", "branches.mixer.k": "attention.key",
        "branches.mixer.v": "attention.value", "branches.mixer.out": "attention.dense",
        "wiring.norms.0.inner": "attention.LayerNorm", "branches.feedforward.into": "ffn",
        "branches.feedforward.out": "ffn_output", "wiring.norms.1.inner": "full_layer_layer_norm",
    }  # fmt: skip
    vocabulary_names = {
        "into": "predictions.dense", "norm": "predictions.LayerNorm", "table": "predictions.decoder",
        "bias": "predictions.bias",
    }  # fmt: skip
    classifier_names = {"into": ".pooler", "out": "classifier"}
    pair_names = {"into": ".pooler", "out": "sop_classifier.classifier"}
    pooler = "pooler"
    dropout = "classifier_dropout_prob"
    defaults = {
        "vocab_size": 30000, "embedding_size": 128, "hidden_size": 4096, "num_hidden_layers": 12,
        "num_attention_heads": 64, "intermediate_size": 16384, "inner_group_num": 1, "hidden_act": "gelu_new",
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 512,
        "type_vocab_size": 2, "layer_norm_eps": 1e-12, "classifier_dropout_prob": 0.1, "tie_word_embeddings": True,
    }  # fmt: skip
    keys = (
        *Encoder.keys,
        Key("embedding_size", "model.embed.dim"),
        Key("max_position_embeddings", "model.embed.position.length"),
    )
    required_values = Encoder.required_values | {"num_hidden_groups": 1}
    ignored = (r"embeddings\.position_ids$", r"^(albert\.)?pooler\.", r"^predictions\.", r"^sop_classifier\.")

    def pair_classes(self, config: Config) -> int:
        return label_count(config)

    def recipe(self, config: Config) -> recipe.Recipe:
        made, several = super().recipe(config), config["inner_group_num"]
        if several < 1:
            raise UserError(f"config.json says inner_group_num = {several}, and it must be at least 1")
        model = made["model"]
        model["depth"] *= several
        model["layer"] = [copy.deepcopy(model["layer"][0]) for _ in range(several)]
        return made

    def config(self, made: recipe.Recipe) -> Config:
        config, model = super().config(made), made["model"]
        several = len(model["layer"])
        if model.get("share") != "layers" or model["depth"] % several:
            raise UserError(f"an albert shares its layers, and here are {model['depth']} of {several} kinds, "
                            f"share = '{model.get('share', 'none')}'")  # fmt: skip
        config |= {"inner_group_num": several, "num_hidden_layers": model["depth"] // several, "num_hidden_groups": 1}
        if "pair" in model["head"]:
            config["num_labels"] = model["head"]["pair"]["classes"]
        return config

    def embedding(self, config: Config, at: str) -> Iterator[Rule]:
        yield from super().embedding(config, at)
        yield from weight_and_bias("embed.up", f"{at}encoder.embedding_hidden_mapping_in")

    def layers(self, config: Config, at: str) -> Iterator[Rule]:
        return super().layers({"num_hidden_layers": config["inner_group_num"]}, at)
