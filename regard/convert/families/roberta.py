"""RoBERTa: BERT with other names in its heads; positions count from the padding's id + 1. CamemBERT and XLM-RoBERTa are
the same for other languages."""

from __future__ import annotations

from typing import Any

from regard.convert.encoder import Encoder
from regard.convert.family import Config
from regard.core import UserError
from regard.files import recipe


class Roberta(Encoder):
    recipe_name = "roberta"
    model_type = "roberta"
    heads = {
        "RobertaForMaskedLM": "vocabulary", "RobertaModel": "vectors", "RobertaForSequenceClassification": "classify",
        "RobertaForTokenClassification": "tag",
    }  # fmt: skip
    architectures = tuple(heads)
    body_prefix = "roberta."
    vocabulary_names = {
        "into": "lm_head.dense", "norm": "lm_head.layer_norm", "table": "lm_head.decoder", "bias": "lm_head.bias",
    }  # fmt: skip
    classifier_names = {"into": "classifier.dense", "out": "classifier.out_proj"}
    pooler = "pooler.dense"
    defaults = {
        "vocab_size": 50265, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1, "max_position_embeddings": 512, "type_vocab_size": 2,
        "layer_norm_eps": 1e-12, "pad_token_id": 1, "tie_word_embeddings": True,
    }  # fmt: skip
    ignored = (r"embeddings\.position_ids$", r"^(roberta\.)?pooler\.", r"^lm_head\.")

    def vocabulary_activation(self, config: Config, model: dict[str, Any]) -> str:
        return "gelu"

    def recipe(self, config: Config) -> recipe.Recipe:
        made, offset = super().recipe(config), config["pad_token_id"] + 1
        length = config["max_position_embeddings"] - offset
        if length < 1:
            raise UserError(f"config.json says max_position_embeddings = {config['max_position_embeddings']}, and the "
                            f"first place is number {offset}")  # fmt: skip
        made["model"]["embed"]["position"] = {"part": "learned", "length": length, "offset": offset}
        return made

    def config(self, made: recipe.Recipe) -> Config:
        position = made["model"]["embed"]["position"]
        offset = position.get("offset", 0)
        if offset < 1:
            raise UserError(f"the offset of the positions is {offset}, and a {self.model_type} has at least 1")
        entries = {"pad_token_id": offset - 1, "max_position_embeddings": position["length"] + offset}
        return super().config(made) | entries


class Camembert(Roberta):
    model_type = "camembert"
    heads = {name.replace("Roberta", "Camembert"): head for name, head in Roberta.heads.items()}
    architectures = tuple(heads)
    defaults = Roberta.defaults | {"vocab_size": 30522}


class XlmRoberta(Roberta):
    model_type = "xlm-roberta"
    heads = {name.replace("Roberta", "XLMRoberta"): head for name, head in Roberta.heads.items()}
    architectures = tuple(heads)
    defaults = Roberta.defaults | {"vocab_size": 30522}
