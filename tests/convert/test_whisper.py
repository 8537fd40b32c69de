"""Whisper against `transformers`: what the encoder hears, scores, gradients, cached steps, padded texts."""

import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration, WhisperModel

from regard.convert.family import family_of
from regard.core import UserError, build
from regard.files import recipe

from .live import agree, in_steps, mask, near, twins

BASE = {
    "vocab_size": 53, "num_mel_bins": 7, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_ffn_dim": 40, "decoder_ffn_dim": 44,
    "max_source_positions": 11, "max_target_positions": 19, "decoder_start_token_id": 1, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "begin_suppress_tokens": None, "attn_implementation": "eager",
}  # fmt: skip
CASES = {
    "plain": {},
    "heads that differ": {"encoder_attention_heads": 2, "decoder_attention_heads": 6, "encoder_layers": 1},
    "untied": {"tie_word_embeddings": False, "decoder_layers": 3, "num_mel_bins": 5},
    "another bend": {"activation_function": "relu", "scale_embedding": True, "d_model": 30, "vocab_size": 41},
    "dropout": {"dropout": 0.1, "attention_dropout": 0.2, "activation_dropout": 0.3, "activation_function": "gelu_new"},
}


def pair(case="plain", kind=WhisperForConditionalGeneration):
    torch.manual_seed(0)
    return twins(kind(WhisperConfig(**BASE | CASES[case])))


def inputs(config, batch=3, time=13):
    draw = torch.Generator().manual_seed(3)
    frames = torch.randn(batch, config["num_mel_bins"], 2 * config["max_source_positions"], generator=draw)
    return frames, torch.randint(3, config["vocab_size"], (batch, time), generator=draw)


@pytest.mark.parametrize("case", CASES)
def test_scores_gradients_and_steps(case):
    both = pair(case)
    frames, tokens = inputs(both.config)
    theirs = both.theirs(input_features=frames, decoder_input_ids=tokens)
    memory = both.ours.encode(frames.mT)
    scores = both.ours(tokens, memory=memory)
    agree(both, [memory.x, scores], [theirs.encoder_last_hidden_state, theirs.logits])
    near(in_steps(both.ours, tokens, [1, 5, 1, 6], memory=memory), theirs.logits, "the scores in steps")


def test_padded_texts():
    both = pair()
    frames, tokens = inputs(both.config)
    valid = mask([13, 4, 9])
    theirs = both.theirs(input_features=frames, decoder_input_ids=tokens, decoder_attention_mask=valid.long())
    ours = both.ours(tokens, valid, source=frames.mT)
    agree(both, [ours[valid]], [theirs.logits[valid]])


def test_the_bare_model():
    both = pair(kind=WhisperModel)
    frames, tokens = inputs(both.config)
    theirs = both.theirs(input_features=frames, decoder_input_ids=tokens)
    near(both.ours.encode(frames.mT).x, theirs.encoder_last_hidden_state)
    hidden: list[torch.Tensor] = []
    hook = both.ours.stack.norm.register_forward_hook(lambda module, given, y: hidden.append(y))
    both.ours(tokens, source=frames.mT)
    hook.remove()
    near(hidden[0], theirs.last_hidden_state)
    again = list(both.family.rules(both.config, ()))  # on its way back nothing but the config tells
    assert [rule.theirs for rule in again] == [rule.theirs for rule in both.rules]


def test_the_fixed_positions_are_theirs_and_do_not_learn():
    """Before any conversion: those that a new model begins with."""
    config = WhisperConfig(**BASE)
    theirs, ours = WhisperModel(config), build(family_of(config.to_dict()).recipe(config.to_dict()))
    near(ours.source_embed.position.table, theirs.encoder.embed_positions.weight.data)
    assert not ours.source_embed.position.table.requires_grad


@pytest.mark.parametrize("size", ["mini", "tiny", "small"])
def test_a_recipe_goes_to_a_config_and_comes_back_as_the_same_model(size):
    family = family_of({"model_type": "whisper"})
    made = recipe.load("whisper", size) | {"vocab": 51865}
    config = WhisperConfig(**family.config(made))
    again = family.recipe(family.complete(config.to_dict()))
    with torch.device("meta"):
        one, two, theirs = build(made), build(again), WhisperForConditionalGeneration(config)
    shapes = [{name: tensor.shape for name, tensor in model.state_dict().items()} for model in (one, two)]
    assert shapes[0] == shapes[1]
    assert sum(p.numel() for p in one.parameters()) == sum(p.numel() for p in theirs.parameters())


def test_padded_sounds():
    """Frames behind the real ones change nothing, whatever they are."""
    ours = pair().ours
    frames, _ = inputs(pair().config)
    valid = mask([11, 3, 8])
    together = ours.encode(frames.mT, valid).x
    for row, length in enumerate([11, 3, 8]):
        near(together[row, :length], ours.encode(frames[row : row + 1, :, : 2 * length].mT).x[0])
    noisy = torch.where(valid.repeat_interleave(2, 1)[:, None], frames, 99.0)
    near(ours.encode(noisy.mT, valid).x[valid], together[valid])


@pytest.mark.parametrize("shape", [(2, 8, 6), (2, 7, 7), (2, 8), (2, 24, 7)])
def test_frames_that_do_not_fit(shape):
    with pytest.raises(UserError, match=r"even number of frames|longer than this model's 11 positions"):
        pair().ours.encode(torch.zeros(*shape))
