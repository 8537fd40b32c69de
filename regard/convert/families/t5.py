"""T5, v1.0 and v1.1: both have the same config class, and differ in the feed-forward and in how the output is scaled.
The relative position bias is stored in the first layer of a stack and used by all."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from regard.convert.family import Config, Family, set_path
from regard.convert.rules import ACTIVATIONS, Key, Rule, same
from regard.core import UserError
from regard.files import recipe

ENCODER, DECODER = "model.encoder.layer.0", "model.decoder.layer.0"
MIXERS = (f"{ENCODER}.mixer", f"{DECODER}.mixer", f"{DECODER}.cross")
FEEDFORWARDS = (f"{ENCODER}.feedforward", f"{DECODER}.feedforward")
STACKS = ("model.encoder", "model.decoder")
T5_ACTIVATIONS = ACTIVATIONS | {"gated-gelu": "gelu_tanh"}  # what they call gelu there is the approximate one


def _in(places: tuple[str, ...], entry: str) -> tuple[str, ...]:
    return tuple(f"{place}.{entry}" for place in places)


class T5(Family):
    recipe_name = "t5"
    recipes = ("t5-v11",)
    model_type = "t5"
    architectures = ("T5ForConditionalGeneration", "T5WithLMHeadModel", "T5Model")
    defaults = {
        "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_decoder_layers": None,
        "num_heads": 8, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
        "dropout_rate": 0.1, "layer_norm_epsilon": 1e-6, "feed_forward_proj": "relu", "tie_word_embeddings": True,
        "is_encoder_decoder": True, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
    }  # fmt: skip
    keys = (
        Key("vocab_size", "vocab"),
        Key("d_model", "model.width"),
        Key("num_heads", "model.heads"),
        Key("num_layers", "model.encoder.depth"),
        Key("num_decoder_layers", "model.decoder.depth"),
        Key("d_kv", _in(MIXERS, "dim")),
        Key("d_ff", _in(FEEDFORWARDS, "hidden")),
        Key("relative_attention_num_buckets", _in(STACKS, "position.buckets")),
        Key("relative_attention_max_distance", _in(STACKS, "position.max_distance")),
        Key(
            "dropout_rate",
            ("model.dropout", *_in(MIXERS, "weight_dropout"), *_in(FEEDFORWARDS, "hidden_dropout")),
        ),
        Key("layer_norm_epsilon", (*_in(STACKS, "norm.eps"), *_in((ENCODER, DECODER), "wiring.norm.eps"))),
    )
    ignored = (r"EncDecAttention\.relative_attention_bias",)

    def config_from_tensors(self, config: Config, names: Collection[str]) -> Config:
        """Return whether the output is tied: newer versions of transformers always say so in config.json, but an untied
        model has a table."""
        tied = config.get("tie_word_embeddings") is not False
        scaled = config.get("scale_decoder_outputs", tied)
        own = "lm_head.weight" in names and not (tied and scaled)
        return {"tie_word_embeddings": not own, "scale_decoder_outputs": scaled} if names else {}

    def complete(self, config: Config) -> Config:
        filled = super().complete(config)
        if filled["num_decoder_layers"] is None:
            filled["num_decoder_layers"] = filled["num_layers"]
        filled.setdefault("scale_decoder_outputs", filled["tie_word_embeddings"])
        return filled

    def recipe(self, config: Config) -> recipe.Recipe:
        made = super().recipe(config)
        gated, activation_name = _parse(config["feed_forward_proj"])
        if gated:
            made |= {k: v for k, v in recipe.load("t5-v11").items() if k not in ("model", "vocab")}
        for place in FEEDFORWARDS:
            set_path(made, f"{place}.part", "glu" if gated else "mlp")
            set_path(made, f"{place}.activation", activation_name)
        set_path(made, "model.tie", "all" if config["tie_word_embeddings"] else "source-target")
        if config["scale_decoder_outputs"]:
            set_path(made, "model.head", {"part": "vocabulary", "scale": "width"})
        else:
            made["model"].pop("head", None)
        return made

    def config(self, made: recipe.Recipe) -> Config:
        config, model = super().config(made), made["model"]
        if model.get("tie") not in ("all", "source-target"):
            raise UserError(f"model.tie is '{model.get('tie', 'none')}', and a t5 has only all, source-target")
        feedforward = model["encoder"]["layer"][0]["feedforward"]
        config["feed_forward_proj"] = _format(feedforward["part"] == "glu", feedforward.get("activation"))
        config["tie_word_embeddings"] = model["tie"] == "all"
        head = model.get("head", {})
        config["scale_decoder_outputs"] = isinstance(head, dict) and head.get("scale") == "width"
        return config

    def rules(self, config: Config, names: Collection[str]) -> Iterator[Rule]:
        gated, _ = _parse(config["feed_forward_proj"])
        maps = {"gate": "wi_0", "into": "wi_1", "out": "wo"} if gated else {"into": "wi", "out": "wo"}
        yield same("embed.table", "shared.weight")
        for ours, theirs, depth in (("encoder", "encoder", "num_layers"), ("stack", "decoder", "num_decoder_layers")):
            attentions = {"mixer": "SelfAttention"} | ({"cross": "EncDecAttention"} if ours == "stack" else {})
            first = f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            yield same(f"{ours}.position.table", first)
            for i in range(config[depth]):
                layer, block = f"{ours}.layers.{i}", f"{theirs}.block.{i}.layer"
                for n, (branch, name) in enumerate(attentions.items()):
                    for letter, map_name in zip("qkvo", ("q", "k", "v", "out"), strict=True):
                        yield same(
                            f"{layer}.branches.{branch}.{map_name}.weight", f"{block}.{n}.{name}.{letter}.weight"
                        )
                    yield same(f"{layer}.wiring.norms.{n}.inner.weight", f"{block}.{n}.layer_norm.weight")
                n = len(attentions)
                for own, name in maps.items():
                    yield same(
                        f"{layer}.branches.feedforward.{own}.weight", f"{block}.{n}.DenseReluDense.{name}.weight"
                    )
                yield same(f"{layer}.wiring.norms.{n}.inner.weight", f"{block}.{n}.layer_norm.weight")
            yield same(f"{ours}.norm.inner.weight", f"{theirs}.final_layer_norm.weight")
        if not config["tie_word_embeddings"]:
            yield same("head.table", "lm_head.weight")

    def aliases(self, config: Config) -> dict[str, str]:
        again = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
        again += ["lm_head.weight"] if config["tie_word_embeddings"] else []
        return dict.fromkeys(again, "shared.weight")


def _parse(text: str) -> tuple[bool, str]:
    """Return whether "gated-gelu" has a gate, and its activation."""
    gated, _, name = text.rpartition("-")
    activation_name = T5_ACTIVATIONS.get(text) or T5_ACTIVATIONS.get(name)
    if gated not in ("", "gated") or activation_name is None:
        raise UserError(f"config.json says feed_forward_proj = '{text}', which regard does not know")
    return bool(gated), activation_name


def _format(gated: bool, activation_name: Any) -> str:
    for name in ("gated-gelu", *(f"gated-{name}" for name in ACTIVATIONS)) if gated else ACTIVATIONS:
        if _parse(name) == (gated, activation_name):
            return name
    raise UserError(f"the feed-forward's activation is '{activation_name}', which a t5 does not have")
