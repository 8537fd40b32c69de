"""Small models of `transformers` for tests: encoders of every family and head, with odd sizes."""

import json

import torch
import transformers
from safetensors.torch import load_file, save_file

from .live import mask, twins

VOCAB, LENGTHS = 47, (13, 5, 9)
VALID = mask(LENGTHS)
SMALL = {
    "vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 34,
    "max_position_embeddings": 19, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
DISTIL = {"vocab_size": VOCAB, "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 34, "max_position_embeddings": 19}
CASES = {
    "bert pretraining": ("BertForPreTraining", SMALL),
    "bert masked": ("BertForMaskedLM", SMALL | {"num_attention_heads": 4, "hidden_act": "gelu_new"}),
    "bert untied": ("BertForMaskedLM", SMALL | {"tie_word_embeddings": False, "type_vocab_size": 3}),
    "bert untied pretraining": ("BertForPreTraining", SMALL | {"tie_word_embeddings": False, "layer_norm_eps": 0.1}),
    "bert bare": ("BertModel", SMALL | {"hidden_act": "relu"}),
    "bert labels": ("BertForSequenceClassification", SMALL | {"num_labels": 5, "classifier_dropout": 0.3}),
    "bert rates": ("BertForSequenceClassification", SMALL | {"num_labels": 1}),
    "bert tags": ("BertForTokenClassification", SMALL | {"num_labels": 4}),
    "roberta masked": ("RobertaForMaskedLM", SMALL | {"hidden_act": "relu", "type_vocab_size": 1}),
    "roberta untied": ("RobertaForMaskedLM", SMALL | {"tie_word_embeddings": False, "pad_token_id": 0}),
    "roberta bare": ("RobertaModel", SMALL | {"pad_token_id": 2}),
    "roberta labels": ("RobertaForSequenceClassification", SMALL | {"num_labels": 3}),
    "roberta tags": ("RobertaForTokenClassification", SMALL),
    "camembert": ("CamembertForMaskedLM", SMALL | {"num_attention_heads": 6}),
    "xlm-roberta": ("XLMRobertaForMaskedLM", SMALL | {"type_vocab_size": 1}),
    "xlm-roberta bare": ("XLMRobertaModel", SMALL),
    "albert masked": ("AlbertForMaskedLM", SMALL | {"embedding_size": 10, "num_hidden_layers": 3}),
    "albert untied": ("AlbertForMaskedLM", SMALL | {"embedding_size": 24, "tie_word_embeddings": False}),
    "albert in groups": ("AlbertForMaskedLM", SMALL | {"embedding_size": 14, "inner_group_num": 2}),
    "albert pretraining": ("AlbertForPreTraining", SMALL | {"embedding_size": 10, "hidden_act": "gelu"}),
    "albert bare": ("AlbertModel", SMALL | {"embedding_size": 10}),
    "albert labels": ("AlbertForSequenceClassification", SMALL | {"embedding_size": 10, "num_labels": 3}),
    "albert tags": ("AlbertForTokenClassification", SMALL | {"embedding_size": 10, "num_labels": 6}),
    "distilbert masked": ("DistilBertForMaskedLM", DISTIL | {"sinusoidal_pos_embds": True}),
    "distilbert untied": ("DistilBertForMaskedLM", DISTIL | {"tie_word_embeddings": False, "activation": "relu"}),
    "distilbert bare": ("DistilBertModel", DISTIL | {"n_heads": 4}),
    "distilbert labels": ("DistilBertForSequenceClassification", DISTIL | {"num_labels": 3}),
    "distilbert rates": ("DistilBertForSequenceClassification", DISTIL | {"num_labels": 1}),
    "distilbert tags": ("DistilBertForTokenClassification", DISTIL | {"num_labels": 7}),
    "roformer masked": ("RoFormerForMaskedLM", SMALL | {"embedding_size": 24}),
    "roformer untied": ("RoFormerForMaskedLM", SMALL | {"embedding_size": 10, "tie_word_embeddings": False}),
    "roformer values": ("RoFormerForMaskedLM", SMALL | {"embedding_size": 10, "rotary_value": True}),
    "roformer bare": ("RoFormerModel", SMALL | {"embedding_size": None, "num_attention_heads": 2}),
    "roformer labels": ("RoFormerForSequenceClassification", SMALL | {"num_labels": 3, "hidden_act": "relu"}),
    "roformer tags": ("RoFormerForTokenClassification", SMALL | {"num_labels": 3}),
}  # fmt: skip


def theirs(architecture, config):
    torch.manual_seed(0)
    kind = getattr(transformers, architecture)
    return kind(kind.config_class(**config))


def saved(architecture, config, folder, drop=(), **more):
    """A folder of theirs, with tensors renamed or dropped and entries of config.json changed."""
    model = twins(theirs(architecture, config)).theirs
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if not k.startswith(drop)} if drop else tensors,
              folder / "model.safetensors", {"format": "pt"})  # fmt: skip
    told = json.loads((folder / "config.json").read_text()) | more
    (folder / "config.json").write_text(json.dumps({k: v for k, v in told.items() if v != "nothing"}))
    return model
