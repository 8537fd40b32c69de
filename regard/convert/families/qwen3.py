"""Qwen 3: Qwen 2 without biases, and with queries and keys normalized in every head."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from regard.convert.family import Config
from regard.convert.rules import Key, Rule, same

from .llama import KEYS, MIXER, Llama
from .qwen2 import Qwen2


class Qwen3(Qwen2):
    recipe_name = "qwen3"
    model_type = "qwen3"
    architectures = ("Qwen3ForCausalLM", "Qwen3ForSequenceClassification", "Qwen3Model")
    defaults = Qwen2.defaults | {"head_dim": 128, "attention_bias": False}
    keys = (
        *(key for key in KEYS if key.theirs != "rms_norm_eps"),
        Key("rms_norm_eps", ("model.norm.eps", "model.layer.0.wiring.norm.eps", f"{MIXER}.qk_norm.eps")),
        Key("attention_bias", f"{MIXER}.bias"),
    )

    def biases(self, config: Config) -> str:
        return Llama.biases(self, config)

    def rules(self, config: Config, names: Collection[str]) -> Iterator[Rule]:
        yield from super().rules(config, names)
        at = self.prefix(config, names)
        for i in range(config["num_hidden_layers"]):
            for name in ("q_norm", "k_norm"):
                ours = f"stack.layers.{i}.branches.mixer.{name}.inner.weight"
                yield same(ours, f"{at}layers.{i}.self_attn.{name}.weight")
