"""Llama, 1 to 3: RMSNorm, rotary positions, a gated feed-forward, and from Llama 2 on grouped-query attention."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import ClassVar

from regard.convert import rope
from regard.convert.decoder import Decoder
from regard.convert.family import Config, get_path
from regard.convert.rules import ACTIVATIONS, Key, Rule, same, weight_and_bias
from regard.files.recipe import Recipe

MIXER, FEEDFORWARD = "model.layer.0.mixer", "model.layer.0.feedforward"

KEYS: tuple[Key, ...] = (
    Key("vocab_size", "vocab"),
    Key("hidden_size", "model.width"),
    Key("intermediate_size", f"{FEEDFORWARD}.hidden"),
    Key("num_hidden_layers", "model.depth"),
    Key("num_attention_heads", "model.heads"),
    Key("hidden_act", f"{FEEDFORWARD}.activation", ACTIVATIONS),
    Key("rms_norm_eps", ("model.norm.eps", "model.layer.0.wiring.norm.eps")),
    Key("attention_dropout", f"{MIXER}.weight_dropout"),
    Key("tie_word_embeddings", "model.tie", {True: "target", False: "none"}),
)


class Llama(Decoder):
    recipe_name = "llama"
    model_type = "llama"
    architectures = ("LlamaForCausalLM", "LlamaForSequenceClassification", "LlamaModel")
    body_prefix, table = "model.", "embed_tokens.weight"
    defaults = {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
        "mlp_bias": False, "attention_dropout": 0.0,
    }  # fmt: skip
    keys: ClassVar[tuple[Key, ...]] = (
        *KEYS,
        Key("attention_bias", f"{MIXER}.bias"),
        Key("mlp_bias", f"{FEEDFORWARD}.bias"),
    )
    ignored = (r"rotary_emb\.inv_freq$",)

    def recipe(self, config: Config) -> Recipe:
        made = super().recipe(config)
        width, heads = config["hidden_size"], config["num_attention_heads"]
        mixer = made["model"]["layer"][0]["mixer"]
        mixer["kv_heads"] = config["num_key_value_heads"] or heads
        dim = config["head_dim"]
        if dim and dim * heads != width:
            mixer["dim"] = dim
        base, scaling = rope.read(config)
        mixer["position"] = {"part": "rotary", "base": base} | ({"scaling": scaling} if scaling else {})
        return made

    def config(self, made: Recipe) -> Config:
        config = super().config(made)
        del config["max_position_embeddings"]  # no limit here: that of the origin, where there is one, stays
        width, heads = made["model"]["width"], made["model"]["heads"]
        config["num_key_value_heads"] = get_path(made, f"{MIXER}.kv_heads", heads)
        config["head_dim"] = get_path(made, f"{MIXER}.dim", width // heads)
        base, scaling = get_path(made, f"{MIXER}.position.base", 10000.0), get_path(made, f"{MIXER}.position.scaling")
        return config | rope.write(base, scaling)

    def biases(self, config: Config) -> str:
        """Return which of an attention's projections have a bias, as letters of "qkvo"."""
        return "qkvo" if config["attention_bias"] else ""

    def rules(self, config: Config, names: Collection[str]) -> Iterator[Rule]:
        at, biased, mlp = self.prefix(config, names), self.biases(config), config.get("mlp_bias", False)
        yield same("embed.table", f"{at}embed_tokens.weight")
        for i in range(config["num_hidden_layers"]):
            ours, theirs = f"stack.layers.{i}", f"{at}layers.{i}"
            yield same(f"{ours}.wiring.norms.0.inner.weight", f"{theirs}.input_layernorm.weight")
            for letter, name in {"q": "q", "k": "k", "v": "v", "o": "out"}.items():
                branch = f"{ours}.branches.mixer.{name}"
                yield from weight_and_bias(branch, f"{theirs}.self_attn.{letter}_proj", bias=letter in biased)
            yield same(f"{ours}.wiring.norms.1.inner.weight", f"{theirs}.post_attention_layernorm.weight")
            for name, original in {"gate": "gate", "into": "up", "out": "down"}.items():
                yield from weight_and_bias(
                    f"{ours}.branches.feedforward.{name}", f"{theirs}.mlp.{original}_proj", bias=mlp
                )
        yield same("stack.norm.inner.weight", f"{at}norm.weight")
        yield from self.head_rules(config)
