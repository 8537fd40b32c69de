"""CLIP: each tower has a table of its own in config.json, and the patch projection is a convolution."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from regard.convert.family import Config, Family
from regard.convert.rules import ACTIVATIONS, Key, Rule, number, reshaped, same, weight_and_bias
from regard.core import UserError

from .vit import preprocessor, square

LARGEST = 2  # the end token that OpenAI's configs name stands for: the one with the largest number
TOWERS = {"text": "text_config", "image": "vision_config"}
TEXT = {
    "model_type": "clip_text_model", "vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048,
    "num_hidden_layers": 12, "num_attention_heads": 8, "max_position_embeddings": 77, "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5, "attention_dropout": 0.0, "eos_token_id": 49407,
}  # fmt: skip
VISION = {
    "model_type": "clip_vision_model", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "num_channels": 3, "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5, "attention_dropout": 0.0,
}  # fmt: skip


def tower(side: str, *norms: str) -> tuple[Key, ...]:
    """Return the keys that both towers have."""
    theirs, ours = TOWERS[side], f"model.{side}"
    places = tuple(f"{ours}.{norm}.eps" for norm in ("norm", "layer.0.wiring.norm", *norms))
    return (
        Key(f"{theirs}.hidden_size", f"{ours}.width"),
        Key(f"{theirs}.num_hidden_layers", f"{ours}.depth"),
        Key(f"{theirs}.num_attention_heads", f"{ours}.heads"),
        Key(f"{theirs}.intermediate_size", f"{ours}.layer.0.feedforward.hidden"),
        Key(f"{theirs}.hidden_act", f"{ours}.layer.0.feedforward.activation", ACTIVATIONS),
        Key(f"{theirs}.attention_dropout", f"{ours}.layer.0.mixer.weight_dropout", into=number),
        Key(f"{theirs}.layer_norm_eps", places),
    )


class Clip(Family):
    recipe_name = "clip"
    model_type = "clip"
    architectures = ("CLIPModel",)
    defaults = {"projection_dim": 512, "logit_scale_init_value": 2.6592, "text_config": TEXT, "vision_config": VISION}
    keys = (
        *tower("text"),
        *tower("image", "embed.norm"),
        Key("projection_dim", ("model.text.head.dim", "model.image.head.dim")),
        Key("logit_scale_init_value", "model.scale"),
        Key("text_config.vocab_size", "vocab"),
        Key("text_config.max_position_embeddings", "model.text.embed.position.length"),
        Key(
            "text_config.eos_token_id",
            "model.end",
            into=lambda end: None if end == LARGEST else end,
            back=lambda end: LARGEST if end is None else end,
        ),
        Key("vision_config.image_size", "model.image.embed.image"),
        Key("vision_config.patch_size", "model.image.embed.patch", into=square),
        Key("vision_config.num_channels", "model.image.embed.channels"),
    )
    ignored = (r"position_ids$",)

    def complete(self, config: Config) -> Config:
        """Fill in the config. Old configs have each tower's table twice, and the second one counts."""
        flat = {key: value for key, value in config.items() if key not in ("text_config_dict", "vision_config_dict")}
        for key, usual in (("text_config", TEXT), ("vision_config", VISION)):
            second = config.get(f"{key}_dict")
            flat[key] = (config.get(key) or {}) | ({} if second is None else usual | second)
        filled = super().complete(flat)
        end = filled["text_config"]["eos_token_id"]
        if not isinstance(end, int):
            raise UserError(f"config.json says text_config.eos_token_id = {end!r}, and regard wants a number there")
        return filled

    def files(self, config: Config, run_info: dict[str, Any]) -> dict[str, Any]:
        return preprocessor(run_info, "CLIPImageProcessor")

    def rules(self, config: Config, names: Collection[str]) -> Iterator[Rule]:
        text, vision = config["text_config"], config["vision_config"]
        width, sides = vision["hidden_size"], [square(vision["patch_size"])] * 2
        into, image = "vision_model.embeddings", "image.embed"
        yield same("scale", "logit_scale")
        yield same("text.embed.table", "text_model.embeddings.token_embedding.weight")
        yield same("text.embed.position.table", "text_model.embeddings.position_embedding.weight")
        yield from _layers("text", "text_model", text["num_hidden_layers"])
        yield from weight_and_bias("text.stack.norm.inner", "text_model.final_layer_norm")
        yield same("text.head.out.weight", "text_projection.weight")
        yield same(f"{image}.token", f"{into}.class_embedding")
        kernel = (width, vision["num_channels"], *sides)
        yield reshaped(f"{image}.into.weight", f"{into}.patch_embedding.weight", (width, -1), kernel)
        yield same(f"{image}.position.table", f"{into}.position_embedding.weight")
        yield from weight_and_bias(f"{image}.norm.inner", "vision_model.pre_layrnorm")
        yield from _layers("image", "vision_model", vision["num_hidden_layers"])
        yield from weight_and_bias("image.stack.norm.inner", "vision_model.post_layernorm")
        yield same("image.head.out.weight", "visual_projection.weight")


def _layers(side: str, model: str, depth: int) -> Iterator[Rule]:
    for i in range(depth):
        ours, theirs = f"{side}.stack.layers.{i}", f"{model}.encoder.layers.{i}"
        for letter in "qkv":
            yield from weight_and_bias(f"{ours}.branches.mixer.{letter}", f"{theirs}.self_attn.{letter}_proj")
        yield from weight_and_bias(f"{ours}.branches.mixer.out", f"{theirs}.self_attn.out_proj")
        yield from weight_and_bias(f"{ours}.branches.feedforward.into", f"{theirs}.mlp.fc1")
        yield from weight_and_bias(f"{ours}.branches.feedforward.out", f"{theirs}.mlp.fc2")
        yield from weight_and_bias(f"{ours}.wiring.norms.0.inner", f"{theirs}.layer_norm1")
        yield from weight_and_bias(f"{ours}.wiring.norms.1.inner", f"{theirs}.layer_norm2")
