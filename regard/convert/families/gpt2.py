"""GPT-2: matrices are stored as (in, out), and query, key and value are fused."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from regard.convert.decoder import Decoder
from regard.convert.family import Config
from regard.convert.rules import ACTIVATIONS, Key, Rule, fused, projections, same, transposed, weight_and_bias


class Gpt2(Decoder):
    recipe_name = "gpt2"
    model_type = "gpt2"
    architectures = ("GPT2LMHeadModel", "GPT2ForSequenceClassification", "GPT2Model")
    body_prefix, table = "transformer.", "wte.weight"
    defaults = {
        "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
        "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    }  # fmt: skip
    keys = (
        Key("vocab_size", "vocab"),
        Key("n_positions", "model.embed.position.length"),
        Key("n_embd", "model.width"),
        Key("n_layer", "model.depth"),
        Key("n_head", "model.heads"),
        Key("n_inner", "model.layer.0.feedforward.hidden"),
        Key("activation_function", "model.layer.0.feedforward.activation", ACTIVATIONS),
        Key("resid_pdrop", "model.dropout"),
        Key("attn_pdrop", "model.layer.0.mixer.weight_dropout"),
        Key("layer_norm_epsilon", ("model.norm.eps", "model.layer.0.wiring.norm.eps")),
        Key("tie_word_embeddings", "model.tie", {True: "target", False: "none"}),
    )
    required_values = {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }
    ignored = (r"attn\.(masked_)?bias$",)

    def rules(self, config: Config, names: Collection[str]) -> Iterator[Rule]:
        at = self.prefix(config, names)
        yield same("embed.table", f"{at}wte.weight")
        yield same("embed.position.table", f"{at}wpe.weight")
        for i in range(config["n_layer"]):
            ours, theirs = f"stack.layers.{i}", f"{at}h.{i}"
            yield from weight_and_bias(f"{ours}.wiring.norms.0.inner", f"{theirs}.ln_1")
            for kind in ("weight", "bias"):
                yield self.qkv_rule(config, projections(f"{ours}.branches.mixer", kind), f"{theirs}.attn.c_attn.{kind}")
            yield from weight_and_bias(f"{ours}.branches.mixer.out", f"{theirs}.attn.c_proj", self.linear_rule)
            yield from weight_and_bias(f"{ours}.wiring.norms.1.inner", f"{theirs}.ln_2")
            yield from weight_and_bias(f"{ours}.branches.feedforward.into", f"{theirs}.mlp.c_fc", self.linear_rule)
            yield from weight_and_bias(f"{ours}.branches.feedforward.out", f"{theirs}.mlp.c_proj", self.linear_rule)
        yield from weight_and_bias("stack.norm.inner", f"{at}ln_f")
        yield from self.head_rules(config)

    def linear_rule(self, ours: str, theirs: str) -> Rule:
        """Return the rule of a linear layer's weight."""
        return transposed(ours, theirs)

    def qkv_rule(self, config: Config, ours: list[str], theirs: str) -> Rule:
        """Return the rule of the fused query, key and value."""
        return fused(ours, theirs, transpose=theirs.endswith("weight"))
