"""XLNet: matrices are stored as (width, heads, dim); the initial vector of the query stream is stored with the
embedding."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from regard.convert.family import Config, Family
from regard.convert.rules import ACTIVATIONS, Key, Rule, reshaped, same, weight_and_bias
from regard.core import UserError
from regard.files.recipe import Recipe

MIXER = "model.layer.0.mixer"


class Xlnet(Family):
    recipe_name = "xlnet"
    model_type = "xlnet"
    architectures = ("XLNetLMHeadModel", "XLNetModel")
    defaults = {
        "vocab_size": 32000, "d_model": 1024, "n_layer": 24, "n_head": 16, "d_inner": 4096, "ff_activation": "gelu",
        "attn_type": "bi", "layer_norm_eps": 1e-12, "dropout": 0.1, "mem_len": 512, "reuse_len": None,
        "clamp_len": -1, "same_length": False, "bi_data": False, "tie_word_embeddings": True,
    }  # fmt: skip
    keys = (
        Key("vocab_size", "vocab"),
        Key("d_model", "model.width"),
        Key("n_layer", "model.depth"),
        Key("n_head", "model.heads"),
        Key("d_inner", "model.layer.0.feedforward.hidden"),
        Key("ff_activation", "model.layer.0.feedforward.activation", ACTIVATIONS),
        Key("attn_type", f"{MIXER}.pattern", {"bi": "everything", "uni": "causal"}),
        Key("layer_norm_eps", "model.layer.0.wiring.norm.eps"),
        Key("dropout", ("model.dropout", f"{MIXER}.weight_dropout", "model.layer.0.feedforward.hidden_dropout")),
        Key("mem_len", f"{MIXER}.memory", into=lambda size: size or 0, back=lambda size: size or None),
        Key(
            "clamp_len",
            f"{MIXER}.position.clip",
            into=lambda most: most if most > 0 else None,
            back=lambda clip: clip or -1,
        ),
        Key("tie_word_embeddings", "model.tie", {True: "target", False: "none"}),
    )
    required_values = {"bi_data": False}

    def complete(self, config: Config) -> Config:
        filled = super().complete({"architectures": [self.architectures[0]]} | config)
        if filled["attn_type"] == "uni" and filled["same_length"]:
            raise UserError("config.json says attn_type = 'uni' with same_length, which regard does not read")
        if filled["reuse_len"]:
            raise UserError(f"config.json says reuse_len = {filled['reuse_len']}, and regard remembers whole segments")
        return filled

    def recipe(self, config: Config) -> Recipe:
        made = super().recipe(config)
        if _bare(config, ()):  # it has no head, and ours is then the table alone
            made["model"] |= {"head": {"part": "vocabulary"}, "tie": "target"}
        return made

    def config(self, made: Recipe) -> Config:
        config, head = super().config(made), made["model"]["head"]
        config |= {"architectures": [self.architectures[0 if isinstance(head, dict) and head.get("bias") else 1]]}
        return config | {"d_head": made["model"]["width"] // made["model"]["heads"]}

    def rules(self, config: Config, names: Collection[str]) -> Iterator[Rule]:
        bare, width, heads = _bare(config, names), config["d_model"], config["n_head"]
        at = "" if bare else "transformer."
        yield same("embed.table", f"{at}word_embedding.weight")
        yield reshaped("embed.asked", f"{at}mask_emb", (width,), (1, 1, width))
        for i in range(config["n_layer"]):
            ours, theirs = f"stack.layers.{i}", f"{at}layer.{i}"
            mixer, attention = f"{ours}.branches.mixer", f"{theirs}.rel_attn"
            for name in "qkv":
                yield _spread(f"{mixer}.{name}.weight", f"{attention}.{name}", heads)
            yield _spread(f"{mixer}.position.of_place.weight", f"{attention}.r", heads)
            yield reshaped(f"{mixer}.out.weight", f"{attention}.o", (width, width), (width, heads, width // heads))
            yield same(f"{mixer}.position.u", f"{attention}.r_w_bias")
            yield same(f"{mixer}.position.v", f"{attention}.r_r_bias")
            yield same(f"{mixer}.s", f"{attention}.r_s_bias")
            yield same(f"{mixer}.kinds", f"{attention}.seg_embed")
            yield from weight_and_bias(f"{ours}.wiring.norms.0.inner", f"{attention}.layer_norm")
            yield from weight_and_bias(f"{ours}.branches.feedforward.into", f"{theirs}.ff.layer_1")
            yield from weight_and_bias(f"{ours}.branches.feedforward.out", f"{theirs}.ff.layer_2")
            yield from weight_and_bias(f"{ours}.wiring.norms.1.inner", f"{theirs}.ff.layer_norm")
        if not bare:
            yield same("head.bias", "lm_loss.bias")
            if not config["tie_word_embeddings"]:
                yield same("head.table", "lm_loss.weight")

    def aliases(self, config: Config) -> dict[str, str]:
        tied = config["tie_word_embeddings"] and not _bare(config, ())
        return {"lm_loss.weight": "transformer.word_embedding.weight"} if tied else {}


def _bare(config: Config, names: Collection[str]) -> bool:
    """Return whether this is XLNetModel, without a head."""
    return "mask_emb" in names if names else config["architectures"][0] == "XLNetModel"


def _spread(ours: str, theirs: str, heads: int) -> Rule:
    """Return the rule for a matrix that they store as (width, heads, dim) and we as (heads dim, width)."""
    return Rule((ours,), theirs, lambda t: [t.flatten(1).mT], lambda ts: ts[0].mT.unflatten(1, (heads, -1)))
