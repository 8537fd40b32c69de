"""T5, Marian, BART and mBART beside `transformers` with random weights: encoder, decoder, gradients,
steps, padded sources."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import regard
from regard.convert import convert, every_family
from regard.convert.check import check
from regard.convert.family import family_of
from regard.core import Context, UserError
from regard.data import Tokenizer
from regard.files.recipe import load

from .live import Twins, agree, in_steps, mask, near, randomise, twins

T5 = {"vocab_size": 41, "d_model": 24, "d_kv": 7, "d_ff": 30, "num_layers": 2, "num_heads": 3,
      "relative_attention_num_buckets": 6, "relative_attention_max_distance": 9}  # fmt: skip
T5S = {
    "relu": T5 | {"num_decoder_layers": 1},
    "gated gelu": T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "gated silu": T5 | {"feed_forward_proj": "gated-silu", "num_heads": 5, "d_kv": 4, "layer_norm_epsilon": 1e-3},
    "gelu": T5 | {"feed_forward_proj": "gelu", "relative_attention_num_buckets": 8},
}
MARIAN = {"vocab_size": 43, "max_position_embeddings": 19, "encoder_layers": 2, "encoder_ffn_dim": 20, "d_model": 24,
          "encoder_attention_heads": 3, "decoder_layers": 1, "decoder_ffn_dim": 28, "decoder_attention_heads": 4,
          "pad_token_id": 42, "decoder_start_token_id": 42, "eos_token_id": 0}  # fmt: skip
MARIANS = {
    "shared": MARIAN | {"scale_embedding": True, "activation_function": "swish"},
    "two vocabularies": MARIAN | {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 43 + 4,
                                  "activation_function": "relu"},
    "nothing tied": MARIAN | {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
    "nothing tied, said otherwise": MARIAN | {"tie_word_embeddings": False, "scale_embedding": True},
}  # fmt: skip
BART = MARIAN | {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
BARTS = {
    "tied": BART,
    "scaled": BART | {"scale_embedding": True, "activation_function": "relu", "decoder_layers": 3},
    "nothing tied": BART | {"tie_word_embeddings": False},
}


def compare(pair: Twins) -> None:
    """The first source is whole, the second padded; no token is the padding one, whose vector does not learn there."""
    draw, vocab = torch.Generator().manual_seed(3), pair.theirs.config.vocab_size
    source, tokens = (torch.randint(3, vocab - 1, (2, n), generator=draw) for n in (13, 9))
    valid = mask([13, 8])
    theirs = pair.theirs(input_ids=source, attention_mask=valid.long(), decoder_input_ids=tokens)
    memory = pair.ours.encode(source, valid)
    bare = not hasattr(theirs, "logits")
    hidden = pair.ours.hidden(tokens, Context.begin(2, 9, memory=memory))
    ours = hidden if bare else pair.ours(tokens, source=source, source_valid=valid)
    want = theirs.last_hidden_state if bare else theirs.logits
    agree(pair, [ours, memory.x[valid]], [want, theirs.encoder_last_hidden_state[valid]])
    if not bare:
        near(in_steps(pair.ours, tokens, [1, 3, 1, 4], source=source, source_valid=valid), want, "the steps")


@pytest.mark.parametrize("name", T5S)
def test_t5(name):
    theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5S[name]))
    pair = twins(theirs)
    compare(pair)
    assert pair.ours.recipe["title"] == ("T5 v1.1" if "gated" in name else "T5")


def test_t5_with_an_output_of_its_own():
    """As the published v1.1 are; newer versions of transformers write into config.json that it is tied."""
    theirs = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5S["gated gelu"]))
    theirs.lm_head.weight = nn.Parameter(torch.randn(41, 24))
    pair = twins(theirs)
    assert theirs.config.tie_word_embeddings
    assert pair.ours.recipe["model"]["tie"] == "source-target"
    compare(pair)


def test_t5_as_older_versions_wrote_it():
    config = T5 | {"model_type": "t5", "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}
    family = family_of(config)
    own = family.recipe(
        family.complete(config | family.config_from_tensors(config, ["shared.weight", "lm_head.weight"]))
    )
    tied = family.recipe(family.complete(config | family.config_from_tensors(config, ["shared.weight"])))
    assert (own["model"]["tie"], tied["model"]["tie"]) == ("source-target", "all")
    assert "head" not in own["model"]
    first = family.complete({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]})
    assert family.recipe(first)["model"]["head"]["scale"] == "width"
    assert family.aliases(first)["lm_head.weight"] == "shared.weight"


@pytest.mark.parametrize("name", MARIANS)
def test_marian(name):
    theirs = transformers.MarianMTModel(transformers.MarianConfig(**MARIANS[name]))
    compare(twins(theirs))


@pytest.mark.parametrize("name", BARTS)
def test_bart(name):
    compare(twins(transformers.BartForConditionalGeneration(transformers.BartConfig(**BARTS[name]))))


@pytest.mark.parametrize("name", BARTS)
def test_mbart(name):
    compare(twins(transformers.MBartForConditionalGeneration(transformers.MBartConfig(**BARTS[name]))))


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (transformers.T5Model, transformers.T5Config(**T5S["relu"])),
        (transformers.MarianModel, transformers.MarianConfig(**MARIANS["shared"])),
        (transformers.MarianModel, transformers.MarianConfig(**MARIANS["two vocabularies"])),
        (transformers.BartModel, transformers.BartConfig(**BARTS["scaled"])),
        (transformers.BartModel, transformers.BartConfig(**BARTS["nothing tied"])),
        (transformers.MBartModel, transformers.MBartConfig(**BARTS["tied"])),
    ],
    ids=lambda given: given.__name__ if isinstance(given, type) else "",
)
def test_without_a_head(model, config):
    compare(twins(model(config)))


def test_sinusoids_that_are_not_stored_are_made():
    theirs = transformers.MarianMTModel(transformers.MarianConfig(**MARIANS["shared"]))
    stored = theirs.model.encoder.embed_positions.weight
    pair = twins(theirs)
    assert torch.equal(pair.ours.source_embed.position.rows, stored)
    told = {n: t for n, t in theirs.state_dict().items() if "embed_positions" not in n}
    config = pair.config | {"stores_positions": False}
    assert "stores_positions" not in pair.family.config_from_tensors(config, told)
    made = pair.family.recipe(config)
    assert made["model"]["embed"]["position"] == {"part": "sinusoidal", "layout": "halves", "length": 19}
    assert not [rule for rule in pair.family.rules(config, told) if rule.theirs not in told]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (T5 | {"model_type": "t5", "feed_forward_proj": "gated-swirl"}, "gated-swirl"),
        (MARIAN | {"model_type": "marian", "normalize_before": True}, "normalize_before"),
        (BART | {"model_type": "bart", "activation_function": "swirl"}, "swirl"),
    ],
)
def test_what_is_not_known_is_refused(config, said):
    family = family_of(config)
    with pytest.raises(UserError, match=said):
        family.recipe(family.complete(config))


T5_CLASS, MARIAN_CLASS, BART_CLASS = (
    transformers.T5ForConditionalGeneration, transformers.MarianMTModel, transformers.BartForConditionalGeneration,
)  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "tie", "kind"),
    [
        ("t5", "all", T5_CLASS), ("t5", "source-target", T5_CLASS), ("t5-v11", "source-target", T5_CLASS),
        ("marian", "all", MARIAN_CLASS), ("marian", "target", MARIAN_CLASS), ("marian", "source-target", MARIAN_CLASS),
        ("bart", "all", BART_CLASS), ("bart", "source-target", BART_CLASS), ("bart", "none", BART_CLASS),
    ],
)  # fmt: skip
def test_what_was_made_here_goes_out(recipe, tie, kind, tmp_path):
    """Also with tables that are shared otherwise than usual."""
    torch.manual_seed(1)
    overrides = [f"model.{side}.depth={depth}" for side, depth in (("encoder", 2), ("decoder", 1))]
    overrides += [f"model.tie={tie}"]
    tokenizer = Tokenizer.train("characters", ["a text with some letters in it"])
    tokenizer.save(tmp_path / "run" / "tokenizer.json")
    regard.save(randomise(regard.build(load(recipe, "tiny", overrides), vocab=tokenizer.size)), tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text(json.dumps({"job": {"recipe": recipe}}))
    convert(tmp_path / "run", tmp_path / "out")
    theirs, told = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    marks = tokenizer.start, tokenizer.end, tokenizer.pad
    assert (theirs.config.decoder_start_token_id, theirs.config.eos_token_id, theirs.config.pad_token_id) == marks
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert check(tmp_path / "run", tmp_path / "out").holds


def test_a_tie_that_there_is_not_is_refused():
    with pytest.raises(UserError, match="a t5 has only all, source-target"):
        every_family()["t5"].config(load("t5", None, ["model.tie=none", "vocab=37"]))
    with pytest.raises(UserError, match="a bart has only all, source-target, none"):
        every_family()["bart"].config(load("bart", None, ["model.tie=target", "vocab=37"]))


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (BART_CLASS, transformers.BartConfig(**BARTS["nothing tied"])),
        (transformers.BartModel, transformers.BartConfig(**BARTS["tied"])),
        (MARIAN_CLASS, transformers.MarianConfig(**MARIANS["nothing tied, said otherwise"])),
        (MARIAN_CLASS, transformers.MarianConfig(**MARIANS["two vocabularies"])),
    ],
)
def test_round_trip(kind, config, tmp_path):
    """Where nothing is tied, there is a table that nothing reads: it comes back, too."""
    theirs, run, back = tmp_path / "theirs", tmp_path / "run", tmp_path / "back"
    randomise(kind(config)).save_pretrained(theirs)
    convert(theirs, run)
    if kind is not transformers.BartModel:
        assert check(run, theirs).holds
    convert(run, back)
    before, after = (load_file(folder / "model.safetensors") for folder in (theirs, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    _, told = kind.from_pretrained(back, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
