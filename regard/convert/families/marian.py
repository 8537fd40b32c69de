"""Marian: BART's names, sinusoids instead of learned places, no norm on the embeddings, and two vocabularies where the
sides share no table."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from regard.convert.family import Config, dig, put
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
    only = {"normalize_before": False, "normalize_embedding": False, "add_final_layer_norm": False}

    def seen(self, config: Config, names: Collection[str]) -> Config:
        kept = any(name.endswith("encoder.embed_positions.weight") for name in names)
        return super().seen(config, names) | ({KEPT: True} if kept else {})

    def whole(self, config: Config) -> Config:
        filled = super().whole(config)
        if filled["share_encoder_decoder_embeddings"] or filled["decoder_vocab_size"] is None:
            filled["decoder_vocab_size"] = filled["vocab_size"]
        return filled

    def recipe(self, config: Config) -> recipe.Recipe:
        made = super().recipe(config)
        if config["decoder_vocab_size"] != config["vocab_size"]:
            made["vocab"] = [config["vocab_size"], config["decoder_vocab_size"]]
        put(made, "model.embed.position.kept", True if config.get(KEPT) else None)
        return made

    def config(self, made: recipe.Recipe) -> Config:
        vocab = made["vocab"] if isinstance(made["vocab"], list) else [made["vocab"]] * 2
        config = super().config(made | {"vocab": vocab[0]}) | {"decoder_vocab_size": vocab[1]}
        return config | ({KEPT: True} if dig(made, "model.embed.position.kept") else {})

    def tables(self, config: Config, at: str, names: Collection[str]) -> Iterator[Rule]:
        if config["share_encoder_decoder_embeddings"]:
            yield from super().tables(config, at, names)
        else:
            yield same("source_embed.table", f"{at}encoder.embed_tokens.weight")
            yield same("embed.table", f"{at}decoder.embed_tokens.weight")

    def places(self, config: Config, ours: str, theirs: str) -> Iterator[Rule]:
        if config.get(KEPT):
            yield same(f"{ours}.position.rows", f"{theirs}.embed_positions.weight")

    def aliases(self, config: Config) -> dict[str, str]:
        if config["share_encoder_decoder_embeddings"]:
            return super().aliases(config)
        tied = config["tie_word_embeddings"] and not self._bare(config)
        return {"lm_head.weight": "model.decoder.embed_tokens.weight"} if tied else {}
