"""Whisper: keys have no bias, and the encoder's fixed positions are kept in the checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator

from regard.convert.family import Config, Family
from regard.convert.rules import ACTIVATIONS, Key, Rule, same, weight_and_bias
from regard.files.recipe import Recipe

NONE = {"back": lambda rate: rate or 0.0}  # a recipe that is silent about a dropout has none


class Whisper(Family):
    recipe_name = "whisper"
    model_type = "whisper"
    architectures = ("WhisperForConditionalGeneration", "WhisperModel")
    defaults = {
        "vocab_size": 51865, "num_mel_bins": 80, "encoder_layers": 4, "encoder_attention_heads": 6, "decoder_layers": 4,
        "decoder_attention_heads": 6, "decoder_ffn_dim": 1536, "encoder_ffn_dim": 1536, "activation_function": "gelu",
        "d_model": 384, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
        "max_source_positions": 1500, "max_target_positions": 448, "tie_word_embeddings": True,
    }  # fmt: skip
    keys = (
        Key("vocab_size", "vocab"),
        Key("num_mel_bins", "model.encoder.embed.channels"),
        Key("d_model", "model.width"),
        Key("encoder_layers", "model.encoder.depth"),
        Key("decoder_layers", "model.decoder.depth"),
        Key("encoder_attention_heads", "model.encoder.heads"),
        Key("decoder_attention_heads", "model.decoder.heads"),
        Key("encoder_ffn_dim", "model.encoder.layer.0.feedforward.hidden"),
        Key("decoder_ffn_dim", "model.decoder.layer.0.feedforward.hidden"),
        Key(
            "activation_function",
            ("model.encoder.layer.0.feedforward.activation", "model.decoder.layer.0.feedforward.activation"),
            ACTIVATIONS,
        ),
        Key("dropout", "model.dropout", **NONE),
        Key(
            "attention_dropout",
            (
                "model.encoder.layer.0.mixer.weight_dropout",
                "model.decoder.layer.0.mixer.weight_dropout",
                "model.decoder.layer.0.cross.weight_dropout",
            ),
            **NONE,
        ),
        Key(
            "activation_dropout",
            ("model.encoder.layer.0.feedforward.hidden_dropout", "model.decoder.layer.0.feedforward.hidden_dropout"),
            **NONE,
        ),
        Key("max_source_positions", "model.encoder.embed.length"),
        Key("max_target_positions", "model.decoder.embed.position.length"),
        Key("tie_word_embeddings", "model.tie", {True: "target", False: "none"}),
    )

    def recipe(self, config: Config) -> Recipe:
        made = super().recipe(config)
        for key in ("depth", "heads"):
            made["model"].pop(key, None)  # each side says its own
        if self._bare(config, ()):
            made["model"]["tie"] = "target"  # it has no head, and ours must have a table
        return made

    def config(self, made: Recipe) -> Config:
        made = copy.deepcopy(made)
        model = made["model"]
        for side in ("encoder", "decoder"):
            model[side].setdefault("depth", model.get("depth", 1))
            model[side].setdefault("heads", model.get("heads", 1))
            model[side]["layer"][0]["feedforward"].setdefault("hidden", 4 * model["width"])
        return super().config(made)

    def rules(self, config: Config, names: Collection[str]) -> Iterator[Rule]:
        at = "" if self._bare(config, names) else "model."
        encoder, decoder = f"{at}encoder", f"{at}decoder"
        yield from weight_and_bias("source_embed.first", f"{encoder}.conv1")
        yield from weight_and_bias("source_embed.second", f"{encoder}.conv2")
        yield same("source_embed.position.table", f"{encoder}.embed_positions.weight")
        yield same("embed.table", f"{decoder}.embed_tokens.weight")
        yield same("embed.position.table", f"{decoder}.embed_positions.weight")
        attentions = [("mixer", "self_attn")]
        for stack, theirs, side in (("encoder", encoder, "encoder"), ("stack", decoder, "decoder")):
            for i in range(config[f"{side}_layers"]):
                yield from _layer(f"{stack}.layers.{i}", f"{theirs}.layers.{i}", attentions)
            yield from weight_and_bias(f"{stack}.norm.inner", f"{theirs}.layer_norm")
            attentions = [*attentions, ("cross", "encoder_attn")]
        if not config["tie_word_embeddings"] and at:
            yield same("head.table", "proj_out.weight")

    def aliases(self, config: Config) -> dict[str, str]:
        return {"proj_out.weight": "model.decoder.embed_tokens.weight"} if config["tie_word_embeddings"] else {}

    def _bare(self, config: Config, names: Collection[str]) -> bool:
        """Return whether this is WhisperModel, without a head."""
        if names:
            return "encoder.conv1.weight" in names
        return (config.get("architectures") or [""])[0] == "WhisperModel"


def _layer(ours: str, theirs: str, attentions: list[tuple[str, str]]) -> Iterator[Rule]:
    for number, (branch, name) in enumerate(attentions):
        yield from weight_and_bias(f"{ours}.wiring.norms.{number}.inner", f"{theirs}.{name}_layer_norm")
        for letter, map_ in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("out", "out_proj")):
            yield from weight_and_bias(
                f"{ours}.branches.{branch}.{letter}", f"{theirs}.{name}.{map_}", bias=letter != "k"
            )
    yield from weight_and_bias(f"{ours}.wiring.norms.{len(attentions)}.inner", f"{theirs}.final_layer_norm")
    yield from weight_and_bias(f"{ours}.branches.feedforward.into", f"{theirs}.fc1")
    yield from weight_and_bias(f"{ours}.branches.feedforward.out", f"{theirs}.fc2")
