"""Transformer-XL, as in the authors' MemTransformerLM and in the former TransfoXLLMHeadModel of transformers:
query, key and value are fused, u and v are shared or not, and the softmax may be adaptive.

The two order the rows of the cluster weights differently: the authors count clusters from the last.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from regard.convert.family import Config, Family
from regard.convert.rules import Key, Rule, fused, projections, same, weight_and_bias
from regard.core import UserError
from regard.files.recipe import Recipe

HUGGING_FACE = {  # defaults of their config class
    "vocab_size": 267735, "cutoffs": [20000, 40000, 200000], "d_model": 1024, "d_embed": 1024, "n_head": 16,
    "d_head": 64, "d_inner": 4096, "div_val": 4, "pre_lnorm": False, "n_layer": 18, "mem_len": 1600, "tgt_len": 128,
    "clamp_len": 1000, "same_length": True, "proj_share_all_but_first": True, "dropout": 0.1, "dropatt": 0.0,
    "untie_r": True, "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5,
}  # fmt: skip
MIXER, WIRING = "model.layer.0.mixer", "model.layer.0.wiring"


class TransfoXl(Family):
    recipe_name = "transformer-xl"
    model_type = "transfo-xl"
    architectures = ("MemTransformerLM", "TransfoXLLMHeadModel")
    defaults = {
        "n_token": 267735, "n_layer": 16, "n_head": 10, "d_model": 410, "d_head": 41, "d_inner": 2100, "dropout": 0.1,
        "dropatt": 0.0, "tie_weight": True, "d_embed": None, "div_val": 1, "tie_projs": [False], "pre_lnorm": False,
        "tgt_len": 150, "ext_len": 0, "mem_len": 150, "cutoffs": [], "attn_type": 0, "clamp_len": -1,
        "same_length": False, "untie_r": False, "layer_norm_epsilon": 1e-5, "sample_softmax": -1,
    }  # fmt: skip
    keys = (
        Key("n_token", "vocab"),
        Key("n_layer", "model.depth"),
        Key("n_head", "model.heads"),
        Key("d_model", "model.width"),
        Key("d_inner", "model.layer.0.feedforward.hidden"),
        Key("dropout", ("model.dropout", "model.layer.0.feedforward.hidden_dropout")),
        Key("dropatt", f"{MIXER}.weight_dropout", back=lambda rate: rate or 0.0),
        Key("tie_weight", "model.tie", {True: "target", False: "none"}),
        Key("pre_lnorm", f"{WIRING}.part", {True: "pre", False: "post"}),
        Key("layer_norm_epsilon", f"{WIRING}.norm.eps"),
        Key("untie_r", f"{MIXER}.position.share", {True: "none", False: "layers"}),
        Key("clamp_len", f"{MIXER}.position.clip", into=lambda most: most if most > 0 else None,
            back=lambda clip: clip or -1),
    )  # fmt: skip
    required_values = {"attn_type": 0, "ext_len": 0, "sample_softmax": -1}
    ignored = (r"pos_emb\.inv_freq$",)

    def complete(self, config: Config) -> Config:
        """Return the config with the authors' names of entries."""
        if "vocab_size" in config:
            theirs = HUGGING_FACE | {k: v for k, v in config.items() if k not in ("n_token", "tie_weight", "tie_projs")}
            words = {"vocab_size": "n_token", "tie_word_embeddings": "tie_weight"}
            config = theirs | {ours: theirs[name] for name, ours in words.items()}
            rest = [bool(theirs["proj_share_all_but_first"])] * len(theirs["cutoffs"])
            config = {"architectures": ["TransfoXLLMHeadModel"]} | config | {"tie_projs": [False, *rest]}
        filled = super().complete({"architectures": [self.architectures[0]]} | config)
        filled["d_embed"] = filled["d_embed"] or filled["d_model"]
        if filled["same_length"] and filled["mem_len"] < 1:
            raise UserError("config.json says same_length with mem_len = 0, so that nothing would be seen")
        return filled

    def recipe(self, config: Config) -> Recipe:
        made = super().recipe(config)
        model = made["model"]
        reach = f"block({config['tgt_len']}, before={config['mem_len']})"
        model["layer"][0]["mixer"]["pattern"] = (
            f"causal & window({config['mem_len']})" if config["same_length"] else f"causal & {reach}"
        )
        if config["d_head"] * config["n_head"] != config["d_model"]:
            model["layer"][0]["mixer"]["dim"] = config["d_head"]
        narrow = config["div_val"] > 1 or config["d_embed"] != config["d_model"]
        table = {"part": "adaptive", "cutoffs": list(config["cutoffs"]), "divide": config["div_val"]}
        table["channels"] = config["d_embed"]
        model["embed"] = table if narrow else {"part": "tokens"}
        if narrow or config["cutoffs"]:
            model["head"] = table | {"shared": [bool(one) for one in config["tie_projs"]]}
        return made

    def config(self, made: Recipe) -> Config:
        config = super().config(made)
        del config["architectures"]  # the words of the rest say whose it is
        model, mixer = made["model"], made["model"]["layer"][0]["mixer"]
        config["d_head"] = mixer.get("dim") or model["width"] // model["heads"]
        pattern = mixer["pattern"]
        if found := re.fullmatch(r"causal & window\((\d+)\)", pattern):
            config |= {"same_length": True, "mem_len": int(found[1])}
        elif found := re.fullmatch(r"causal & block\((\d+), before=(\d+)\)", pattern):
            config |= {"same_length": False, "tgt_len": int(found[1]), "mem_len": int(found[2])}
        else:
            raise UserError(f"a transfo-xl sees 'causal & block(N, before=M)' or 'causal & window(M)', not '{pattern}'")
        head: Any = model["head"]
        adaptive = head if isinstance(head, dict) and head["part"] == "adaptive" else {}
        config |= {"cutoffs": adaptive.get("cutoffs", []), "div_val": adaptive.get("divide", 1)}
        config |= {"d_embed": adaptive.get("channels") or model["width"]}
        return config | {"tie_projs": adaptive.get("shared", [False])}

    def rules(self, config: Config, names: Collection[str]) -> Iterator[Rule]:
        at = _at(config)
        for i in range(config["n_layer"]):
            ours, theirs = f"stack.layers.{i}", f"{at}layers.{i}"
            mixer, attention = f"{ours}.branches.mixer", f"{theirs}.dec_attn"
            yield fused(projections(mixer, "weight"), f"{attention}.qkv_net.weight")
            yield same(f"{mixer}.out.weight", f"{attention}.o_net.weight")
            yield same(f"{mixer}.position.of_place.weight", f"{attention}.r_net.weight")
            if config["untie_r"]:
                yield same(f"{mixer}.position.u", f"{attention}.r_w_bias")
                yield same(f"{mixer}.position.v", f"{attention}.r_r_bias")
            yield from weight_and_bias(f"{ours}.wiring.norms.0.inner", f"{attention}.layer_norm")
            yield from weight_and_bias(f"{ours}.branches.feedforward.into", f"{theirs}.pos_ff.CoreNet.0")
            yield from weight_and_bias(f"{ours}.branches.feedforward.out", f"{theirs}.pos_ff.CoreNet.3")
            yield from weight_and_bias(f"{ours}.wiring.norms.1.inner", f"{theirs}.pos_ff.layer_norm")
        if not config["untie_r"]:
            first = "stack.layers.0.branches.mixer.position"
            yield same(f"{first}.u", f"{at}r_w_bias")
            yield same(f"{first}.v", f"{at}r_r_bias")
        yield from _vocabulary_rules(config, at)

    def aliases(self, config: Config) -> dict[str, str]:
        at, made = _at(config), {}
        tables, maps, outs = _counts(config)
        if config["tie_weight"]:
            made |= {f"crit.out_layers.{g}.weight": f"{at}word_emb.emb_layers.{g}.weight" for g in range(tables)}
            for g in range(outs):
                if _tied(config, g):
                    made[f"crit.out_projs.{g}"] = f"{at}word_emb.emb_projs.{g if maps > 1 else 0}"
        if not config["untie_r"]:
            for i in range(config["n_layer"]):
                made |= {f"{at}layers.{i}.dec_attn.{name}": f"{at}{name}" for name in ("r_w_bias", "r_r_bias")}
        return made


def _at(config: Config) -> str:
    return "transformer." if config["architectures"][0] == "TransfoXLLMHeadModel" else ""


def _counts(config: Config) -> tuple[int, int, int]:
    """Return the numbers of tables, of projections of the embedding and of projections of the softmax."""
    groups = len(config["cutoffs"]) + 1
    if config["div_val"] > 1:
        return groups, groups, groups
    return (1, 1, groups) if config["d_embed"] != config["d_model"] else (1, 0, 0)


def _tied(config: Config, group: int) -> bool:
    return config["tie_weight"] and group < len(config["tie_projs"]) and bool(config["tie_projs"][group])


def _vocabulary_rules(config: Config, at: str) -> Iterator[Rule]:
    """Yield the rules of the embedding and of the softmax."""
    tables, maps, outs = _counts(config)
    adaptive = bool(outs or config["cutoffs"])
    for g in range(tables):
        ours = "table" if g == 0 else f"tails.{g - 1}"
        yield same(f"embed.{ours}", f"{at}word_emb.emb_layers.{g}.weight")
        if not config["tie_weight"]:
            yield same(f"head.{ours}", f"crit.out_layers.{g}.weight")
        yield same(f"head.biases.{g}" if adaptive else "head.bias", f"crit.out_layers.{g}.bias")
    for g in range(maps):
        yield same(f"embed.maps.{g}", f"{at}word_emb.emb_projs.{g}")
    for g in range(outs):
        if not _tied(config, g):
            yield same(f"head.maps.{g}", f"crit.out_projs.{g}")
    if config["cutoffs"]:
        for ours, theirs in (("of_group", "cluster_weight"), ("group_bias", "cluster_bias")):
            rule = same(f"head.{ours}", f"crit.{theirs}")
            yield rule if at else Rule(rule.ours, rule.theirs, lambda t: [t.flip(0)], lambda ts: ts[0].flip(0))
