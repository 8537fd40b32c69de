"""BART, and mBART, which is pre-norm. The names of a layer's tensors are those of fairseq."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from regard.convert.family import Config, Family, get_path, set_path
from regard.convert.rules import ACTIVATIONS, Key, Rule, reshaped, same, weight_and_bias
from regard.core import UserError
from regard.files import recipe

ENCODER, DECODER = "model.encoder.layer.0", "model.decoder.layer.0"
MIXERS = (f"{ENCODER}.mixer.weight_dropout", f"{DECODER}.mixer.weight_dropout", f"{DECODER}.cross.weight_dropout")
TIES = {(True, True): "all", (True, False): "source-target", (False, True): "target", (False, False): "none"}


class Bart(Family):
    """BART. two_tables: source and target may have different tables while the output is tied to the target's."""

    two_tables = False
    recipe_name = "bart"
    model_type = "bart"
    architectures = ("BartForConditionalGeneration", "BartModel")
    defaults: Config = {
        "vocab_size": 50265, "max_position_embeddings": 1024, "encoder_layers": 12, "encoder_ffn_dim": 4096,
        "encoder_attention_heads": 16, "decoder_layers": 12, "decoder_ffn_dim": 4096, "decoder_attention_heads": 16,
        "activation_function": "gelu", "d_model": 1024, "dropout": 0.1, "attention_dropout": 0.0,
        "activation_dropout": 0.0, "scale_embedding": False, "tie_word_embeddings": True, "is_encoder_decoder": True,
        "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
    }  # fmt: skip
    keys = (
        Key("vocab_size", "vocab"),
        Key("max_position_embeddings", "model.embed.position.length"),
        Key("encoder_layers", "model.encoder.depth"),
        Key("encoder_ffn_dim", f"{ENCODER}.feedforward.hidden"),
        Key("encoder_attention_heads", "model.encoder.heads"),
        Key("decoder_layers", "model.decoder.depth"),
        Key("decoder_ffn_dim", f"{DECODER}.feedforward.hidden"),
        Key("decoder_attention_heads", "model.decoder.heads"),
        Key("activation_function", (f"{ENCODER}.feedforward.activation", f"{DECODER}.feedforward.activation"),
            ACTIVATIONS),
        Key("d_model", "model.width"),
        Key("dropout", "model.dropout"),
        Key("attention_dropout", MIXERS),
        Key("activation_dropout", (f"{ENCODER}.feedforward.hidden_dropout", f"{DECODER}.feedforward.hidden_dropout")),
        Key("scale_embedding", "model.embed.scale"),
    )  # fmt: skip
    required_values = {"normalize_before": False, "normalize_embedding": True, "add_final_layer_norm": False}
    ignored = (r"^(model\.)?(encoder|decoder)\.version$", r"^(model\.)?shared\.weight$")  # where nobody reads it

    def config_from_tensors(self, config: Config, names: Collection[str]) -> Config:
        """Return whether there is a head, and, where nothing is tied, whether source and target have different
        tables."""
        bare = "encoder.layers.0.fc1.weight" in names
        extra: Config = {"architectures": [self.architectures[1]]} if bare else {}
        own = f"{'' if bare else 'model.'}encoder.embed_tokens.weight" in names
        if config.get("tie_word_embeddings") is False and own:
            extra["share_encoder_decoder_embeddings"] = False
        return extra

    def recipe(self, config: Config) -> recipe.Recipe:
        made = super().recipe(config)
        tied = config["tie_word_embeddings"] or self._bare(config)  # without a head, nothing else says what is right
        set_path(made, "model.tie", TIES[config.get("share_encoder_decoder_embeddings", True), tied])
        set_path(made, "model.head.bias", None if self._bare(config) else True)
        return made

    def config(self, made: recipe.Recipe) -> Config:
        config, bare = super().config(made), not get_path(made, "model.head.bias")
        share, tied = next(pair for pair, name in TIES.items() if name == get_path(made, "model.tie", "none"))
        if not (share or self.two_tables or bare) and tied:
            raise UserError(f"model.tie is 'target', and a {self.model_type} has only all, source-target, none")
        config |= {name: config[name] or 0.0 for name in ("attention_dropout", "activation_dropout")}
        config["tie_word_embeddings"] = tied and (share or self.two_tables)
        if not share or self.two_tables:
            config["share_encoder_decoder_embeddings"] = share
        return config | ({"architectures": [self.architectures[1]]} if bare else {})

    def rules(self, config: Config, names: Collection[str]) -> Iterator[Rule]:
        at = "" if self._bare(config) else "model."
        yield from self.table_rules(config, at, names)
        for ours, theirs in (("source_embed", "encoder"), ("embed", "decoder")):
            yield from self.embedding_rules(config, ours, f"{at}{theirs}")
        for ours, theirs in (("encoder", "encoder"), ("stack", "decoder")):
            yield from layers(ours, f"{at}{theirs}", config[f"{theirs}_layers"])
        if self._bare(config):
            return
        if not config["tie_word_embeddings"]:
            yield same("head.table", "lm_head.weight")
        vocab = config.get("decoder_vocab_size") or config["vocab_size"]
        yield reshaped("head.bias", "final_logits_bias", (vocab,), (1, vocab))

    def table_rules(self, config: Config, at: str, names: Collection[str]) -> Iterator[Rule]:
        """Yield the rules of the embedding tables. Where nothing is tied, newer versions of transformers want all three
        names, and do not use the first."""
        share = config.get("share_encoder_decoder_embeddings", True)
        if share or not names:
            yield same("embed.table", f"{at}shared.weight")
        if config["tie_word_embeddings"]:
            return
        for ours, side in (("embed.table" if share else "source_embed.table", "encoder"), ("embed.table", "decoder")):
            if not names or f"{at}{side}.embed_tokens.weight" in names:
                yield same(ours, f"{at}{side}.embed_tokens.weight")

    def embedding_rules(self, config: Config, ours: str, theirs: str) -> Iterator[Rule]:
        """Yield the rules of an embedding apart from its table."""
        yield same(f"{ours}.position.table", f"{theirs}.embed_positions.weight")
        yield from weight_and_bias(f"{ours}.norm.inner", f"{theirs}.layernorm_embedding")

    def aliases(self, config: Config) -> dict[str, str]:
        at = "" if self._bare(config) else "model."
        if not (config["tie_word_embeddings"] and config.get("share_encoder_decoder_embeddings", True)):
            return {}
        again = [f"{at}encoder.embed_tokens.weight", f"{at}decoder.embed_tokens.weight", "lm_head.weight"]
        return dict.fromkeys(again, f"{at}shared.weight")

    def _bare(self, config: Config) -> bool:
        return (config.get("architectures") or [""])[0] == self.architectures[1]


def layers(ours: str, theirs: str, depth: int) -> Iterator[Rule]:
    """Yield the rules of a stack's layers. ours: "encoder" or "stack"."""
    attentions = {"mixer": "self_attn"} | ({"cross": "encoder_attn"} if ours == "stack" else {})
    for i in range(depth):
        layer, there = f"{ours}.layers.{i}", f"{theirs}.layers.{i}"
        for n, (branch, name) in enumerate(attentions.items()):
            for letter in ("q", "k", "v", "out"):
                yield from weight_and_bias(f"{layer}.branches.{branch}.{letter}", f"{there}.{name}.{letter}_proj")
            yield from weight_and_bias(f"{layer}.wiring.norms.{n}.inner", f"{there}.{name}_layer_norm")
        yield from weight_and_bias(f"{layer}.branches.feedforward.into", f"{there}.fc1")
        yield from weight_and_bias(f"{layer}.branches.feedforward.out", f"{there}.fc2")
        yield from weight_and_bias(f"{layer}.wiring.norms.{len(attentions)}.inner", f"{there}.final_layer_norm")


class Mbart(Bart):
    model_type = "mbart"
    architectures = ("MBartForConditionalGeneration", "MBartModel")
    defaults = Bart.defaults | {"decoder_start_token_id": None}
    required_values: Config = {"normalize_before": True, "normalize_embedding": True, "add_final_layer_norm": True}

    def recipe(self, config: Config) -> recipe.Recipe:
        made = super().recipe(config)
        for side in ("encoder", "decoder"):
            set_path(made, f"model.{side}.layer.0.wiring", "pre")
            set_path(made, f"model.{side}.norm", "layer")
        return made

    def rules(self, config: Config, names: Collection[str]) -> Iterator[Rule]:
        yield from super().rules(config, names)
        at = "" if self._bare(config) else "model."
        for ours, theirs in (("encoder", "encoder"), ("stack", "decoder")):
            yield from weight_and_bias(f"{ours}.norm.inner", f"{at}{theirs}.layer_norm")
