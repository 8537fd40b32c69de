"""BERT: two heads for pretraining, one tied to the embedding table; sentence encoders such as MiniLM, too."""

from __future__ import annotations

from regard.convert.encoder import Encoder
from regard.convert.rules import Key


class Bert(Encoder):
    recipe_name = "bert"
    recipes = ("minilm",)
    model_type = "bert"
    heads = {
        "BertForPreTraining": "pretrain", "BertForMaskedLM": "vocabulary", "BertModel": "vectors",
        "BertForSequenceClassification": "classify", "BertForTokenClassification": "tag",
    }  # fmt: skip
    architectures = tuple(heads)
    body_prefix = "bert."
    classifier_names = {"into": ".pooler.dense", "out": "classifier"}
    pair_names = {"into": ".pooler.dense", "out": "cls.seq_relationship"}
    pooler = "pooler.dense"
    defaults = {
        "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1, "max_position_embeddings": 512, "type_vocab_size": 2,
        "layer_norm_eps": 1e-12, "tie_word_embeddings": True,
    }  # fmt: skip
    keys = (*Encoder.keys, Key("max_position_embeddings", "model.embed.position.length"))
    ignored = (r"embeddings\.position_ids$", r"^(bert\.)?pooler\.", r"^cls\.(predictions|seq_relationship)\.")
