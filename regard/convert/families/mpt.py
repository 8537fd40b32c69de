"""MPT: linear biases instead of positions, and no other biases anywhere.

MosaicML's own code and the class in `transformers` read one config.json differently: the latter always has slopes down
to 2^-8 and a feed-forward of four times the width. `architectures` tells them apart: MPTForCausalLM is MosaicML's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from regard.convert.decoder import Decoder
from regard.convert.family import Config, get_path
from regard.convert.rules import Key, Rule, fused, projections, same
from regard.core import UserError
from regard.files.recipe import Recipe

OWN = "MPTForCausalLM"
SLOPES, HIDDEN, SCORE = (
    "model.layer.0." + name for name in ("mixer.position.last", "feedforward.hidden", "mixer.score")
)
REQUIRED_VALUES = {  # where it is MosaicML's; the class in `transformers` qkv_rule at none of them
    "attn_config.attn_type": "multihead_attention", "attn_config.alibi": True, "attn_config.prefix_lm": False,
    "attn_config.qk_ln": False, "no_bias": True, "logit_scale": None, "norm_type": "low_precision_layernorm",
}  # fmt: skip


class Mpt(Decoder):
    recipe_name = "mpt"
    model_type = "mpt"
    architectures = ("MptForCausalLM", OWN, "MptForSequenceClassification", "MptModel")
    body_prefix, table = "transformer.", "wte.weight"
    defaults = {
        "d_model": 2048, "n_heads": 16, "n_layers": 24, "expansion_ratio": 4, "vocab_size": 50368, "resid_pdrop": 0.0,
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
        "attn_config": {"attn_pdrop": 0.0, "alibi": True, "alibi_bias_max": 8, "clip_qkv": None, "softmax_scale": None},
    }  # fmt: skip
    keys = (
        Key("vocab_size", "vocab"),
        Key("d_model", "model.width"),
        Key("n_layers", "model.depth"),
        Key("n_heads", "model.heads"),
        Key("resid_pdrop", "model.dropout"),
        Key("attn_config.attn_pdrop", "model.layer.0.mixer.weight_dropout"),
        Key("layer_norm_epsilon", ("model.norm.eps", "model.layer.0.wiring.norm.eps")),
        Key("tie_word_embeddings", "model.tie", {True: "target", False: "none"}),
    )

    def complete(self, config: Config) -> Config:
        filled = super().complete(config)
        if filled["attn_config"]["clip_qkv"]:
            raise UserError("config.json says attn_config.clip_qkv, and regard reads an mpt only without it")
        for name, value in REQUIRED_VALUES.items() if self.own(filled) else ():
            if (found := get_path(filled, name, value)) != value:
                raise UserError(f"config.json says {name} = {found!r}, and regard reads an mpt only with {value!r}")
        return filled

    def own(self, config: Config) -> bool:
        """Return whether the config is MosaicML's."""
        return OWN in (config.get("architectures") or ())

    def recipe(self, config: Config) -> Recipe:
        made, own, attention = super().recipe(config), self.own(config), config["attn_config"]
        layer = made["model"]["layer"][0]
        layer["mixer"]["position"] = {"part": "alibi", "last": attention["alibi_bias_max"] if own else 8}
        layer["feedforward"]["hidden"] = int((config["expansion_ratio"] if own else 4) * config["d_model"])
        if attention["softmax_scale"] is not None:
            layer["mixer"]["score"] = {"part": "scaled_dot", "scale": attention["softmax_scale"]}
        return made

    def config(self, made: Recipe) -> Config:
        config, width = super().config(made), made["model"]["width"]
        hidden = get_path(made, HIDDEN, 4 * width)
        own = {"slopes": get_path(made, SLOPES, 8), "ratio": hidden // width if hidden % width == 0 else hidden / width}
        config["attn_config"]["softmax_scale"] = get_path(made, f"{SCORE}.scale")
        if own == {"slopes": 8, "ratio": 4}:
            del config["attn_config"]["alibi_bias_max"], config["expansion_ratio"]
            return config
        config["attn_config"]["alibi_bias_max"] = own["slopes"]
        return config | {"expansion_ratio": own["ratio"], "architectures": [OWN]}

    def rules(self, config: Config, names: Collection[str]) -> Iterator[Rule]:
        at = self.prefix(config, names)
        yield same("embed.table", f"{at}wte.weight")
        for i in range(config["n_layers"]):
            ours, theirs = f"stack.layers.{i}", f"{at}blocks.{i}"
            yield same(f"{ours}.wiring.norms.0.inner.weight", f"{theirs}.norm_1.weight")
            yield fused(projections(f"{ours}.branches.mixer", "weight"), f"{theirs}.attn.Wqkv.weight")
            yield same(f"{ours}.branches.mixer.out.weight", f"{theirs}.attn.out_proj.weight")
            yield same(f"{ours}.wiring.norms.1.inner.weight", f"{theirs}.norm_2.weight")
            yield same(f"{ours}.branches.feedforward.into.weight", f"{theirs}.ffn.up_proj.weight")
            yield same(f"{ours}.branches.feedforward.out.weight", f"{theirs}.ffn.down_proj.weight")
        yield same("stack.norm.inner.weight", f"{at}norm_f.weight")
        yield from self.head_rules(config)
