"""RoFormer: BERT with rotary positions, whose table is stored among the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from regard.convert.encoder import Encoder
from regard.convert.family import Config, get_path
from regard.convert.rules import Key, Rule, same, weight_and_bias
from regard.files import recipe


class Roformer(Encoder):
    recipe_name = "roformer"
    model_type = "roformer"
    heads = {
        "RoFormerForMaskedLM": "vocabulary", "RoFormerModel": "vectors",
        "RoFormerForSequenceClassification": "classify", "RoFormerForTokenClassification": "tag",
    }  # fmt: skip
    architectures = tuple(heads)
    body_prefix = "roformer."
    classifier_names = {"into": "classifier.dense", "out": "classifier.out_proj"}
    defaults = {
        "vocab_size": 50000, "embedding_size": None, "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "intermediate_size": 3072, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1, "max_position_embeddings": 1536, "type_vocab_size": 2,
        "layer_norm_eps": 1e-12, "rotary_value": False, "tie_word_embeddings": True,
    }  # fmt: skip
    keys = (
        *Encoder.keys,
        Key("max_position_embeddings", "model.position.length"),
        Key("rotary_value", "model.position.values"),
    )
    ignored = (r"^cls\.predictions\.",)

    def classifier_activation(self, model: dict[str, Any]) -> str:
        return model["layer"][0]["feedforward"]["activation"]

    def recipe(self, config: Config) -> recipe.Recipe:
        made, dim = super().recipe(config), config["embedding_size"]
        if dim not in (None, config["hidden_size"]):
            made["model"]["embed"]["dim"] = dim
        return made

    def config(self, made: recipe.Recipe) -> Config:
        return super().config(made) | {"embedding_size": get_path(made, "model.embed.dim", made["model"]["width"])}

    def embedding(self, config: Config, at: str) -> Iterator[Rule]:
        yield same("embed.table", f"{at}embeddings.word_embeddings.weight")
        yield same("embed.segment_table", f"{at}embeddings.token_type_embeddings.weight")
        yield from weight_and_bias("embed.norm.inner", f"{at}embeddings.LayerNorm")
        if config["embedding_size"] not in (None, config["hidden_size"]):
            yield from weight_and_bias("embed.up", f"{at}embeddings_project")
        yield same("stack.position.table", f"{at}encoder.embed_positions.weight")
