"""Mistral: Llama with a sliding window."""

from __future__ import annotations

from regard.convert.family import Config
from regard.convert.rules import Key
from regard.convert.window import pattern_of, window_of

from .llama import KEYS, MIXER, Llama


class Mistral(Llama):
    recipe_name = "mistral"
    model_type = "mistral"
    architectures = ("MistralForCausalLM", "MistralForSequenceClassification", "MistralModel")
    defaults = {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": None, "hidden_act": "silu",
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "sliding_window": 4096,
        "attention_dropout": 0.0,
    }  # fmt: skip
    keys = (*KEYS, Key("sliding_window", f"{MIXER}.pattern", into=pattern_of, back=window_of))

    def biases(self, config: Config) -> str:
        return ""
