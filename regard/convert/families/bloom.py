"""BLOOM: ALiBi instead of positions, a norm on the embedding; query, key and value are fused, interleaved by heads."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from regard.convert.decoder import Decoder
from regard.convert.family import Config
from regard.convert.rules import Key, Rule, interleaved, projections, same, weight_and_bias

SYNONYMS = {"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}


class Bloom(Decoder):
    recipe_name = "bloom"
    model_type = "bloom"
    architectures = ("BloomForCausalLM", "BloomForSequenceClassification", "BloomModel")
    body_prefix, table = "transformer.", "word_embeddings.weight"
    defaults = {
        "vocab_size": 250880, "hidden_size": 64, "n_layer": 2, "n_head": 8, "layer_norm_epsilon": 1e-5,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "tie_word_embeddings": True,
        "apply_residual_connection_post_layernorm": False,
    }  # fmt: skip
    keys = (
        Key("vocab_size", "vocab"),
        Key("hidden_size", "model.width"),
        Key("n_layer", "model.depth"),
        Key("n_head", "model.heads"),
        Key("layer_norm_epsilon", ("model.norm.eps", "model.embed.norm.eps", "model.layer.0.wiring.norm.eps")),
        Key("hidden_dropout", "model.dropout"),
        Key("attention_dropout", "model.layer.0.mixer.weight_dropout"),
        Key("tie_word_embeddings", "model.tie", {True: "target", False: "none"}),
    )
    required_values = {"apply_residual_connection_post_layernorm": False}

    def complete(self, config: Config) -> Config:
        """Fill in the config, in which published models use other names for some entries."""
        known = {SYNONYMS[name]: value for name, value in config.items() if name in SYNONYMS}
        return super().complete(known | config)

    def rules(self, config: Config, names: Collection[str]) -> Iterator[Rule]:
        at = self.prefix(config, names)
        yield same("embed.table", f"{at}word_embeddings.weight")
        yield from weight_and_bias("embed.norm.inner", f"{at}word_embeddings_layernorm")
        for i in range(config["n_layer"]):
            ours, theirs = f"stack.layers.{i}", f"{at}h.{i}"
            yield from weight_and_bias(f"{ours}.wiring.norms.0.inner", f"{theirs}.input_layernorm")
            for kind in ("weight", "bias"):
                maps = projections(f"{ours}.branches.mixer", kind)
                yield interleaved(maps, f"{theirs}.self_attention.query_key_value.{kind}", config["n_head"])
            yield from weight_and_bias(f"{ours}.branches.mixer.out", f"{theirs}.self_attention.dense")
            yield from weight_and_bias(f"{ours}.wiring.norms.1.inner", f"{theirs}.post_attention_layernorm")
            yield from weight_and_bias(f"{ours}.branches.feedforward.into", f"{theirs}.mlp.dense_h_to_4h")
            yield from weight_and_bias(f"{ours}.branches.feedforward.out", f"{theirs}.mlp.dense_4h_to_h")
        yield from weight_and_bias("stack.norm.inner", f"{at}ln_f")
        yield from self.head_rules(config)
