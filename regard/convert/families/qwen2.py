"""Qwen 2 and 2.5: Llama with biases on queries, keys and values; its last layers may have a sliding window."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from regard.convert.family import Config, get_path
from regard.convert.rules import Key
from regard.convert.window import pattern_of, window_of
from regard.core import UserError
from regard.files.recipe import Recipe

from .llama import KEYS, Llama

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


class Qwen2(Llama):
    recipe_name = "qwen"
    model_type = "qwen2"
    architectures = ("Qwen2ForCausalLM", "Qwen2ForSequenceClassification", "Qwen2Model")
    defaults = {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": None, "hidden_act": "silu",
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None,
        "attention_dropout": 0.0,
    }  # fmt: skip
    keys: ClassVar[tuple[Key, ...]] = KEYS

    def biases(self, config: Config) -> str:
        return "qkv"

    def recipe(self, config: Config) -> Recipe:
        made = super().recipe(config)
        patterns = [pattern_of(window) for window in windows(config)]
        period = next(n for n in range(1, len(patterns) + 1) if patterns == _repeated(patterns[:n], len(patterns)))
        layer = made["model"]["layer"][0]
        made["model"]["layer"] = [copy.deepcopy(layer) for _ in range(period)]
        for own, pattern in zip(made["model"]["layer"], patterns, strict=False):
            own["mixer"]["pattern"] = pattern
        return made

    def config(self, made: Recipe) -> Config:
        config = super().config(made)
        for name in WINDOW:
            del config[name]
        layers, depth = made["model"]["layer"], config["num_hidden_layers"]
        seen = _repeated([window_of(get_path(layer, "mixer.pattern")) for layer in layers], depth)
        sizes = {window for window in seen if window is not None}
        if len(sizes) > 1:
            raise UserError(f"a {self.model_type} has one window for all layers that have one, not {sorted(sizes)}")
        if not sizes:
            return config | {"use_sliding_window": False}  # what the origin says of a window that nobody uses, stays
        return config | {
            "use_sliding_window": True, "sliding_window": sizes.pop(),
            "max_window_layers": next(i for i, window in enumerate(seen) if window is not None),
            "layer_types": [FULL if window is None else SLIDING for window in seen],
        }  # fmt: skip


def windows(config: Config) -> list[int | None]:
    """Of every layer."""
    depth, size = config["num_hidden_layers"], config["sliding_window"] if config["use_sliding_window"] else None
    kinds = config["layer_types"]
    if kinds is None:
        kinds = [SLIDING if i >= config["max_window_layers"] else FULL for i in range(depth)]
    if len(kinds) != depth or set(kinds) - {FULL, SLIDING}:
        raise UserError(f"config.json gives layer_types {kinds}; regard reads {FULL} and {SLIDING}, one for each of "
                        f"{depth} layers")  # fmt: skip
    return [size if kind == SLIDING else None for kind in kinds]


def _repeated(some: list[Any], count: int) -> list[Any]:
    return [some[i % len(some)] for i in range(count)]
