"""Marian: BART's names with sinusoidal instead of learned positions, no norm on the embeddings, and two vocabularies
where source and target share no table."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from regard.convert.family import Config, get_path, set_path
from regard.convert.rules import Rule, same
from regard.files import recipe

from .bart import Bart

KEPT = "stores_positions"  # in config.json: the sinusoids stand among the tensors


class Marian(Bart):
    two_tables = True
    recipe_name = "marian"
    model_type = "marian"
    architectures = ("MarianMTModel", "MarianModel")
    defaults = Bart.defaults | {
        "vocab_size": 58101, "decoder_vocab_size": None, "share_encoder_decoder_embeddings": True,
        "pad_token_id": 58100, "bos_token_id": None, "eos_token_id": 0, "decoder_start_token_id": 58100,
    }  # fmt: skip
    required_values = {"normalize_before": False, "normalize_embedding": False, "add_final_layer_norm": False}

    def config_from_tensors(self, config: Config, names: Collection[str]) -> Config:
        kept = any(name.endswith("encoder.embed_positions.weight") for name in names)
        return super().config_from_tensors(config, names) | ({KEPT: True} if kept else {})

    def complete(self, config: Config) -> Config:
        filled = super().complete(config)
        if filled["share_encoder_decoder_embeddings"] or filled["decoder_vocab_size"] is None:
            filled["decoder_vocab_size"] = filled["vocab_size"]
        return filled

    def recipe(self, config: Config) -> recipe.Recipe:
        made = super().recipe(config)
        if config["decoder_vocab_size"] != config["vocab_size"]:
            made["vocab"] = [config["vocab_size"], config["decoder_vocab_size"]]
        set_path(made, "model.embed.position.kept", True if config.get(KEPT) else None)
        return made

    def config(self, made: recipe.Recipe) -> Config:
        vocab = made["vocab"] if isinstance(made["vocab"], list) else [made["vocab"]] * 2
        config = super().config(made | {"vocab": vocab[0]}) | {"decoder_vocab_size": vocab[1]}
        return config | ({KEPT: True} if get_path(made, "model.embed.position.kept") else {})

    def table_rules(self, config: Config, at: str, names: Collection[str]) -> Iterator[Rule]:
        if config["share_encoder_decoder_embeddings"]:
            yield from super().table_rules(config, at, names)
        else:
            yield same("source_embed.table", f"{at}encoder.embed_tokens.weight")
            yield same("embed.table", f"{at}decoder.embed_tokens.weight")

    def embedding_rules(self, config: Config, ours: str, theirs: str) -> Iterator[Rule]:
        if config.get(KEPT):
            yield same(f"{ours}.position.rows", f"{theirs}.embed_positions.weight")

    def aliases(self, config: Config) -> dict[str, str]:
        if config["share_encoder_decoder_embeddings"]:
            return super().aliases(config)
        tied = config["tie_word_embeddings"] and not self._bare(config)
        return {"lm_head.weight": "model.decoder.embed_tokens.weight"} if tied else {}
