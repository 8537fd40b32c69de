"""For every family: a Hugging Face folder becomes a run and a folder again, byte by byte, and `transformers` finds
everything where it looks for it."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from regard.convert import convert, every_family
from regard.convert.check import check

SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
LLAMA = SMALL | {"vocab_size": 61, "max_position_embeddings": 48}
BERT = LLAMA | {"type_vocab_size": 2}
SIDES = {
    "d_model": 24, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 3, "decoder_attention_heads": 3,
    "encoder_ffn_dim": 40, "decoder_ffn_dim": 32,
}  # fmt: skip
BART = SIDES | {"vocab_size": 61, "max_position_embeddings": 48, "pad_token_id": 1, "decoder_start_token_id": 2}

MODELS = {
    "GPT2LMHeadModel": {"vocab_size": 61, "n_positions": 48, "n_embd": 24, "n_layer": 2, "n_head": 3},
    "GPT2LMHeadModel untied": {"vocab_size": 61, "n_embd": 24, "n_layer": 1, "n_head": 3, "tie_word_embeddings": False},
    "GPT2Model": {"vocab_size": 61, "n_positions": 48, "n_embd": 24, "n_layer": 1, "n_head": 2, "n_inner": 50},
    "LlamaForCausalLM": LLAMA | {"num_key_value_heads": 1},
    "LlamaForCausalLM biased": LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "MistralForCausalLM": LLAMA | {"num_key_value_heads": 3, "sliding_window": 5},
    "Qwen2ForCausalLM": LLAMA | {"num_key_value_heads": 1},
    "Qwen3ForCausalLM": LLAMA | {"num_key_value_heads": 1, "head_dim": 8},
    "BloomForCausalLM": {"vocab_size": 61, "hidden_size": 24, "n_layer": 2, "n_head": 3},
    "MptForCausalLM": {"vocab_size": 61, "d_model": 24, "n_layers": 2, "n_heads": 3, "max_seq_len": 48},
    "GPTBigCodeForCausalLM": {"vocab_size": 61, "n_positions": 48, "n_embd": 24, "n_layer": 2, "n_head": 3},
    "BertForPreTraining": BERT,
    "BertForMaskedLM": BERT,
    "BertModel": BERT,
    "RobertaForMaskedLM": BERT | {"pad_token_id": 1, "type_vocab_size": 1},
    "XLMRobertaForMaskedLM": BERT | {"pad_token_id": 1, "type_vocab_size": 1},
    "CamembertForMaskedLM": BERT | {"pad_token_id": 1, "type_vocab_size": 1},
    "BertForSequenceClassification": BERT | {"num_labels": 5},
    "BertForTokenClassification": BERT | {"num_labels": 5},
    "AlbertForMaskedLM": BERT | {"embedding_size": 16},
    "DistilBertForMaskedLM": {"vocab_size": 61, "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 40},
    "RoFormerForMaskedLM": BERT | {"embedding_size": 24},
    "T5ForConditionalGeneration": {
        "vocab_size": 61, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 3,
    },
    "T5ForConditionalGeneration 1.1": {
        "vocab_size": 61, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 1, "num_heads": 3,
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    },
    "MarianMTModel": BART | {"pad_token_id": 60, "decoder_start_token_id": 60},
    "BartForConditionalGeneration": BART,
    "MBartForConditionalGeneration": BART,
    "XLNetLMHeadModel": {"vocab_size": 61, "d_model": 24, "n_layer": 2, "n_head": 3, "d_inner": 40},
    "ViTForImageClassification": SMALL | {"image_size": 16, "patch_size": 4, "num_labels": 5},
    "CLIPModel": {
        "text_config": BERT | {"eos_token_id": 60}, "vision_config": SMALL | {"image_size": 16, "patch_size": 4},
        "projection_dim": 20,
    },
    "WhisperForConditionalGeneration": SIDES | {
        "vocab_size": 61, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 20,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    },
}  # fmt: skip


def tiny(name: str, folder) -> torch.nn.Module:
    """A model of transformers in which every number is random, saved."""
    kind = getattr(transformers, name.split()[0])
    torch.manual_seed(len(name))
    model = kind(kind.config_class(**MODELS[name]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(folder)
    return model


def test_every_family_is_tried():
    tried = {getattr(transformers, name.split()[0]).config_class.model_type for name in MODELS}
    assert tried >= set(every_family()) - ELSEWHERE


ELSEWHERE = {"transfo-xl"}  # no longer in transformers


@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name, tmp_path):
    theirs, run, back = tmp_path / "theirs", tmp_path / "run", tmp_path / "back"
    tiny(name, theirs)
    convert(theirs, run)
    assert check(run, theirs).holds
    convert(run, back)
    before, after = (load_file(folder / "model.safetensors") for folder in (theirs, back))
    assert before.keys() == after.keys()
    for tensor in before:
        assert before[tensor].dtype == after[tensor].dtype
        assert before[tensor].numpy().tobytes() == after[tensor].numpy().tobytes(), tensor
    assert (
        json.loads((theirs / "config.json").read_text()).items()
        <= json.loads((back / "config.json").read_text()).items()
    )
    kind = getattr(transformers, name.split()[0])
    _, told = kind.from_pretrained(back, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert not told["mismatched_keys"]


def test_half_precision_and_shards_go_through(tmp_path):
    theirs, run, back = tmp_path / "theirs", tmp_path / "run", tmp_path / "back"
    tiny("LlamaForCausalLM", theirs).to(torch.bfloat16).save_pretrained(theirs, max_shard_size="20KB")
    (theirs / "model.safetensors").unlink()
    assert len(list(theirs.glob("model-*.safetensors"))) > 1
    convert(theirs, run)
    assert {t.dtype for t in load_file(run / "model.safetensors").values()} == {torch.bfloat16}
    convert(run, back, shard=10_000)
    before, after = ({k: v for path in sorted(folder.glob("model-*.safetensors")) for k, v in load_file(path).items()}
                     for folder in (theirs, back))  # fmt: skip
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert transformers.LlamaForCausalLM.from_pretrained(back, dtype=torch.bfloat16) is not None
