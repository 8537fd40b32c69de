"""GPTBigCode (SantaCoder, StarCoder): GPT-2 with multi-query attention, and matrices stored as (out, in)."""

from __future__ import annotations

from regard.convert.family import Config, get_path
from regard.convert.rules import Key, Rule, fused, interleaved, same
from regard.core import UserError
from regard.files.recipe import Recipe

from .gpt2 import Gpt2

MIXER = "model.layer.0.mixer"


class GptBigcode(Gpt2):
    recipe_name = "starcoder"
    model_type = "gpt_bigcode"
    architectures = ("GPTBigCodeForCausalLM", "GPTBigCodeForSequenceClassification", "GPTBigCodeModel")
    defaults = Gpt2.defaults | {
        "activation_function": "gelu_pytorch_tanh", "scale_attn_weights": True, "multi_query": True,
    }  # fmt: skip
    keys = (*Gpt2.keys, Key("scale_attn_weights", f"{MIXER}.score", {True: "scaled_dot", False: "dot"}))
    required_values = {"add_cross_attention": False}

    def recipe(self, config: Config) -> Recipe:
        made = super().recipe(config)
        made["model"]["layer"][0]["mixer"]["kv_heads"] = 1 if config["multi_query"] else config["n_head"]
        return made

    def config(self, made: Recipe) -> Config:
        config = super().config(made)
        shared = get_path(made, f"{MIXER}.kv_heads", config["n_head"])
        if shared not in (1, config["n_head"]):
            raise UserError(f"{MIXER}.kv_heads is {shared}, and a gpt_bigcode has 1, or as many as heads")
        config["multi_query"] = shared == 1
        return config

    def linear_rule(self, ours: str, theirs: str) -> Rule:
        return same(ours, theirs)

    def qkv_rule(self, config: Config, ours: list[str], theirs: str) -> Rule:
        width, heads = config["n_embd"], config["n_head"]
        dim = width // heads
        return fused(ours, theirs, (width, dim, dim)) if config["multi_query"] else interleaved(ours, theirs, heads)
