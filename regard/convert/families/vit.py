"""ViT: the patch projection is a convolution. Checkpoints name layers as version 4 of transformers did; version 5 reads
those, and has shorter names in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from regard.convert.encoder import label_count
from regard.convert.family import Config, Family
from regard.convert.rules import ACTIVATIONS, Key, Rule, number, reshaped, same, weight_and_bias
from regard.core import UserError
from regard.data.images import ImageProcessor, to_preprocessor_config
from regard.files.recipe import Recipe

OLD = {
    "layer": "encoder.layer.{}", "q": "attention.attention.query", "k": "attention.attention.key",
    "v": "attention.attention.value", "out": "attention.output.dense", "into": "intermediate.dense",
    "back": "output.dense",
}  # fmt: skip
NEW = {
    "layer": "layers.{}", "q": "attention.q_proj", "k": "attention.k_proj", "v": "attention.v_proj",
    "out": "attention.o_proj", "into": "mlp.fc1", "back": "mlp.fc2",
}  # fmt: skip


def square(size: Any) -> int:
    """Return the side of a patch, of which some configs give height and width."""
    sides = list(size) if isinstance(size, list | tuple) else [size]
    if len(set(sides)) != 1:
        raise UserError(f"config.json says patch_size = {size!r}, and regard reads only square patches")
    return sides[0]


def preprocessor(run_info: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return preprocessor_config.json for a run that was trained here."""
    if "images" not in run_info:
        return {}
    return {"preprocessor_config.json": to_preprocessor_config(ImageProcessor.read(run_info["images"]), kind)}


class Vit(Family):
    recipe_name = "vit"
    model_type = "vit"
    architectures = ("ViTForImageClassification", "ViTModel")
    reads = "images"
    defaults = {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layer_norm_eps": 1e-12,
        "image_size": 224, "patch_size": 16, "num_channels": 3, "qkv_bias": True, "pooler_output_size": None,
        "pooler_act": "tanh",
    }  # fmt: skip
    keys = (
        Key("hidden_size", "model.width"),
        Key("num_hidden_layers", "model.depth"),
        Key("num_attention_heads", "model.heads"),
        Key("intermediate_size", "model.layer.0.feedforward.hidden"),
        Key("hidden_act", "model.layer.0.feedforward.activation", ACTIVATIONS),
        Key("hidden_dropout_prob", "model.dropout", into=number),
        Key("attention_probs_dropout_prob", "model.layer.0.mixer.weight_dropout", into=number),
        Key("layer_norm_eps", ("model.norm.eps", "model.layer.0.wiring.norm.eps")),
        Key("image_size", "model.embed.image"),
        Key("patch_size", "model.embed.patch", into=square),
        Key("num_channels", "model.embed.channels"),
        Key("qkv_bias", "model.layer.0.mixer.bias", {True: True, False: "o"}),
    )

    def recipe(self, config: Config) -> Recipe:
        made = super().recipe(config)
        if _architecture(config) == "ViTModel":
            dim = config["pooler_output_size"] or config["hidden_size"]
            activation_name = self._named(Key("pooler_act", "", ACTIVATIONS), config["pooler_act"])
            pooler = {"part": "vector", "dim": dim, "pool": "first", "activation": activation_name, "bias": True}
            summary = {"part": "summary", "vector": pooler}
            made["model"]["head"] = summary if config.get("add_pooling_layer", True) else {"part": "none"}
        else:
            made["model"]["head"]["classes"] = label_count(config)
        return made

    def config(self, made: Recipe) -> Config:
        config, head = super().config(made), made["model"]["head"]
        if head["part"] == "classify":
            return config | {"num_labels": head["classes"]}
        config["architectures"] = ["ViTModel"]
        if head["part"] == "none":
            return config | {"add_pooling_layer": False}
        back = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
        vector = head["vector"]
        return config | {"pooler_output_size": vector["dim"], "pooler_act": back[vector["activation"]]}

    def config_from_tensors(self, config: Config, names: Collection[str]) -> Config:
        """Return whether a bare model has a pooler, which config.json does not say."""
        if _architecture(config) != "ViTModel" or not names:
            return {}
        return {"add_pooling_layer": any(name.endswith("pooler.dense.weight") for name in names)}

    def files(self, config: Config, run_info: dict[str, Any]) -> dict[str, Any]:
        return preprocessor(run_info, "ViTImageProcessor")

    def rules(self, config: Config, names: Collection[str]) -> Iterator[Rule]:
        bare = _architecture(config) == "ViTModel"
        at = "" if bare and not any(name.startswith("vit.") for name in names) else "vit."
        new = any(name.startswith(f"{at}layers.") for name in names)
        names_of, width, sides = NEW if new else OLD, config["hidden_size"], [square(config["patch_size"])] * 2
        into = f"{at}embeddings.patch_embeddings.projection"
        yield reshaped("embed.token", f"{at}embeddings.cls_token", (width,), (1, 1, width))
        yield reshaped("embed.position.table", f"{at}embeddings.position_embeddings", (-1, width), (1, -1, width))
        yield reshaped("embed.into.weight", f"{into}.weight", (width, -1), (width, config["num_channels"], *sides))
        yield same("embed.into.bias", f"{into}.bias")
        for i in range(config["num_hidden_layers"]):
            ours, theirs = f"stack.layers.{i}", f"{at}{names_of['layer'].format(i)}"
            yield from weight_and_bias(f"{ours}.wiring.norms.0.inner", f"{theirs}.layernorm_before")
            for letter in "qkv":
                yield from weight_and_bias(
                    f"{ours}.branches.mixer.{letter}", f"{theirs}.{names_of[letter]}", bias=config["qkv_bias"]
                )
            yield from weight_and_bias(f"{ours}.branches.mixer.out", f"{theirs}.{names_of['out']}")
            yield from weight_and_bias(f"{ours}.wiring.norms.1.inner", f"{theirs}.layernorm_after")
            yield from weight_and_bias(f"{ours}.branches.feedforward.into", f"{theirs}.{names_of['into']}")
            yield from weight_and_bias(f"{ours}.branches.feedforward.out", f"{theirs}.{names_of['back']}")
        yield from weight_and_bias("stack.norm.inner", f"{at}layernorm")
        if not bare:
            yield from weight_and_bias("head.out", "classifier")
        elif config.get("add_pooling_layer", True):
            yield from weight_and_bias("head.vector.out", f"{at}pooler.dense")


def _architecture(config: Config) -> str:
    return (config.get("architectures") or Vit.architectures)[0]
