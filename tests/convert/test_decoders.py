"""Decoders of other people against their classes in `transformers`: scores, gradients, steps, padded batches."""

import copy
import json
import warnings

import pytest
import torch
from safetensors.torch import load_file

from regard.convert import convert, rope
from regard.convert.check import check
from regard.convert.family import every_family, family_of
from regard.core import UserError, build
from regard.files import recipe

from .live import agree, in_steps, mask, near, randomise, twins

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.jit at import
    import transformers as hf
    from transformers.models.gpt_bigcode import modeling_gpt_bigcode  # noqa: F401

LLAMA = {
    "vocab_size": 47, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1, "max_position_embeddings": 29, "rms_norm_eps": 1e-3,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 50.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 70.0, "factor": 4.0, "beta_fast": 2.0}
YARN["original_max_position_embeddings"] = 60
SHARP = {"mscale": 2.0, "mscale_all_dim": 0.5, "truncate": False}
BLOOM = {"vocab_size": 47, "hidden_size": 36, "n_layer": 2, "n_head": 6, "layer_norm_epsilon": 1e-3}
MPT = {"vocab_size": 47, "d_model": 36, "n_layers": 2, "n_heads": 6, "max_seq_len": 29, "layer_norm_epsilon": 1e-3}
GPT = {"vocab_size": 47, "n_positions": 29, "n_embd": 36, "n_layer": 2, "n_head": 3, "n_inner": 50}

CASES = {
    "llama": ("Llama", LLAMA),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 3}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "hidden_act": "gelu", "num_key_value_heads": None}),
    "llama-dim": ("Llama", {"head_dim": 10, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 3.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16}}),
    "llama-llama3-unsaid": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-yarn-sharp": ("Llama", {"rope_parameters": YARN | SHARP}),
    "llama-yarn-attention": ("Llama", {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_slow": 0.5}}),
    "mistral": ("Mistral", {"sliding_window": 4}),
    "mistral-whole": ("Mistral", {"sliding_window": None, "tie_word_embeddings": True, "head_dim": 14}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3", {"head_dim": 10, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "qwen3-window": (
        "Qwen3",
        {
            "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 5, "head_dim": 12,
            "attention_bias": True, "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "bloom": ("Bloom", BLOOM),
    "bloom-untied": ("Bloom", BLOOM | {"n_head": 3, "tie_word_embeddings": False}),
    "mpt": ("Mpt", MPT),
    "mpt-untied": (
        "Mpt",
        MPT | {"n_heads": 3, "tie_word_embeddings": False, "attn_config": {"softmax_scale": 0.2, "alibi_bias_max": 4}},
    ),
    "gpt_bigcode": ("GPTBigCode", GPT),
    "gpt_bigcode-heads": ("GPTBigCode", GPT | {"multi_query": False, "scale_attn_weights": False, "n_inner": None}),
    "gpt_bigcode-untied": ("GPTBigCode", GPT | {"activation_function": "relu", "tie_word_embeddings": False}),
    "gpt2": ("GPT2", GPT),
    "gpt2-untied": ("GPT2", GPT | {"n_inner": None, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3}),
}  # fmt: skip
BARE = {"Llama": {}, "Qwen3": {"head_dim": 12}, "Bloom": BLOOM, "Mpt": MPT, "GPTBigCode": GPT}


def theirs(name: str, given: dict, kind: str = "ForCausalLM"):
    given = LLAMA | given if name in ("Llama", "Mistral", "Qwen2", "Qwen3") else given
    config = getattr(hf, f"{name}Config")(**copy.deepcopy(given))
    torch.manual_seed(0)
    kind = "LMHeadModel" if (name, kind) == ("GPT2", "ForCausalLM") else kind
    return getattr(hf, f"{name}{kind}")(config)


def said(name: str, given: dict) -> dict:
    """A config.json."""
    return {"model_type": name, **given}


def made(config: dict) -> dict:
    family = family_of(config)
    return family.recipe(family.complete(config))


@pytest.mark.parametrize("name", CASES)
def test_the_same(name):
    """A padded batch, all gradients; then whole rows in steps."""
    cls, given = CASES[name]
    pair = twins(theirs(cls, given))
    tokens, valid = torch.randint(47, (3, 13)), mask([13, 9, 5])
    wanted = pair.theirs(tokens, attention_mask=valid.long()).logits
    agree(pair, [pair.ours(tokens, valid=valid)[valid]], [wanted[valid]])
    with torch.no_grad():
        near(in_steps(pair.ours, tokens, (5, 1, 1, 4, 2)), pair.theirs(tokens).logits, "steps")


@pytest.mark.parametrize("cls", BARE)
def test_a_bare_model_gives_vectors(cls):
    pair = twins(theirs(cls, BARE[cls], "Model"))
    tokens = torch.randint(47, (2, 9))
    agree(pair, [pair.ours(tokens)], [pair.theirs(tokens).last_hidden_state])
    assert pair.family.config(pair.ours.recipe)["architectures"] == [f"{cls}Model"]


@pytest.mark.parametrize("cls", BARE)
def test_a_classifier_is_asked_at_the_end(cls):
    model = theirs(cls, BARE[cls] | {"num_labels": 5, "pad_token_id": 0}, "ForSequenceClassification")
    pair = twins(model)
    valid = mask([9, 4, 7])
    tokens = torch.randint(1, 47, (3, 9)) * valid
    agree(pair, [pair.ours(tokens, valid=valid)], [model(tokens, attention_mask=valid.long()).logits])
    assert pair.family.config(pair.ours.recipe)["architectures"] == [f"{cls}ForSequenceClassification"]


def test_a_classifier_goes_there_and_back(tmp_path):
    given = BLOOM | {"num_labels": 3, "pad_token_id": 0}
    went_and_came(theirs("Bloom", given, "ForSequenceClassification"), tmp_path)


def test_a_model_trained_here_to_classify_goes_out():
    made_here = recipe.load("llama", "tiny") | {"vocab": 9, "objective": {"part": "classify"}}
    made_here["model"]["head"] = {"part": "classify", "dropout": 0.1, "pool": "last", "classes": 4, "bias": False}
    del made_here["model"]["tie"]
    config = every_family()["llama"].config(made_here)
    assert undropped(made(config)["model"]) == undropped(made_here["model"])


def test_a_config_that_does_not_say_its_class():
    """Untied and without a head it is bare; tied, its table is the head's."""
    for given, kind in (({}, "none"), ({"tie_word_embeddings": True}, "vocabulary")):
        config = said("llama", LLAMA | given)
        family = family_of(config)
        whole = family.complete(config | family.config_from_tensors(config, {"embed_tokens.weight", "norm.weight"}))
        assert family.recipe(whole)["model"].get("head", "vocabulary") == kind


@pytest.mark.parametrize("name", ["llama-yarn-sharp", "llama-dim", "qwen2-window", "qwen3-window", "mpt-untied"])
def test_there_and_back(name, tmp_path):
    went_and_came(theirs(*CASES[name]), tmp_path)


@pytest.mark.parametrize("cls", BARE)
def test_a_bare_model_goes_there_and_back(cls, tmp_path):
    went_and_came(theirs(cls, BARE[cls], "Model"), tmp_path)


def went_and_came(model, folder) -> None:
    """Not one byte is lost, no entry of config.json, and `transformers` finds all that it looks for."""
    randomise(model).save_pretrained(folder / "theirs")
    convert(folder / "theirs", folder / "run")
    assert check(folder / "run", folder / "theirs").holds
    convert(folder / "run", folder / "back")
    before, after = (load_file(folder / name / "model.safetensors") for name in ("theirs", "back"))
    assert before.keys() == after.keys()
    assert all(before[name].numpy().tobytes() == after[name].numpy().tobytes() for name in before)
    told = [json.loads((folder / name / "config.json").read_text()) for name in ("theirs", "back")]
    assert told[0].items() <= told[1].items()
    _, said = type(model).from_pretrained(folder / "back", output_loading_info=True)
    assert not any(said[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


OURS = [name for name, family in every_family().items() if family.recipe_name in
        ("gpt2", "llama", "mistral", "qwen", "qwen3", "bloom", "mpt", "starcoder")]  # fmt: skip


def undropped(table):
    if isinstance(table, dict):
        return {key: undropped(value) for key, value in table.items() if "dropout" not in key}
    return [undropped(value) for value in table] if isinstance(table, list) else table


@pytest.mark.parametrize("name", OURS)
def test_every_size_goes_out_and_comes_back(name):
    family = every_family()[name]
    for size in recipe.sizes(family.recipe_name):
        whole = recipe.load(family.recipe_name, size) | {"vocab": 61}
        again = family.recipe(family.complete(family.config(whole)))
        assert undropped(again["model"]) == undropped(whole["model"]), size
        assert again["vocab"] == 61


def test_old_and_new_rope_are_the_same():
    for kind in ("type", "rope_type"):
        old = {"rope_theta": 5e5, "rope_scaling": {kind: "linear", "factor": 2.0}}
        new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}
        assert rope.read(LLAMA | old) == rope.read(LLAMA | new) == (5e5, {"kind": "linear", "factor": 2.0})
    assert rope.read(LLAMA | {"rope_scaling": None}) == (10000.0, None)


def test_mosaic_mpt_is_read_as_mosaic_has_it():
    """`transformers` ignores both entries; a config of MosaicML's own class means them."""
    entries = MPT | {"expansion_ratio": 2, "attn_config": {"alibi_bias_max": 16}}
    layer = made(said("mpt", entries | {"architectures": ["MPTForCausalLM"]}))["model"]["layer"][0]
    assert (layer["mixer"]["position"]["last"], layer["feedforward"]["hidden"]) == (16, 72)
    layer = made(said("mpt", entries | {"architectures": ["MptForCausalLM"]}))["model"]["layer"][0]
    assert (layer["mixer"]["position"]["last"], layer["feedforward"]["hidden"]) == (8, 144)


def test_mosaic_mpt_goes_back():
    config = MPT | {"architectures": ["MPTForCausalLM"], "expansion_ratio": 2, "attn_config": {"alibi_bias_max": 16}}
    back = every_family()["mpt"].config(made(said("mpt", config)))
    assert (back["architectures"], back["expansion_ratio"]) == (["MPTForCausalLM"], 2)
    assert made(back) == made(said("mpt", config))


def test_published_bloom_says_it_otherwise():
    old = {"n_embed": 48, "num_attention_heads": 4, "n_layer": 3, "vocab_size": 9}
    model = made(said("bloom", old))["model"]
    assert (model["width"], model["heads"], model["depth"]) == (48, 4, 3)


def test_names_without_prefix_are_a_language_model_still():
    """As the published BLOOM has them."""
    pair = twins(theirs("Bloom", BLOOM))
    names = {name.removeprefix("transformer.") for name in pair.theirs.state_dict()}
    rules = list(pair.family.rules(pair.config, names))
    assert {rule.theirs for rule in rules} == names - {"lm_head.weight"}
    assert {name for rule in rules for name in rule.ours} == {name for rule in pair.rules for name in rule.ours}


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (said("llama", LLAMA | {"rope_scaling": {"type": "longrope", "factor": 2.0}}), "longrope"),
        (said("llama", LLAMA | {"rope_scaling": {"type": "linear"}}), "factor"),
        (said("llama", LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}), "partial_rotary_factor"),
        (said("qwen2", LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 9.0}}}), "one table"),
        (said("llama", LLAMA | {"rope_scaling": "linear"}), "one table"),
        (said("llama", LLAMA | {"hidden_act": "snake"}), "hidden_act"),
        (said("qwen2", LLAMA | {"layer_types": ["full_attention", "chunked_attention"]}), "layer_types"),
        (said("bloom", BLOOM | {"apply_residual_connection_post_layernorm": True}), "apply_residual"),
        (said("mpt", MPT | {"attn_config": {"clip_qkv": 6.0}}), "clip_qkv"),
        (said("mpt", MPT | {"attn_config": {"qk_ln": True}, "architectures": ["MPTForCausalLM"]}), "qk_ln"),
        (said("llama", LLAMA | {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}), "one label"),
        (said("gpt_bigcode", GPT | {"add_cross_attention": True}), "add_cross_attention"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["model_type"],
)
def test_what_regard_cannot_do_is_refused(config, word):
    with pytest.raises(UserError, match=word):
        made(config)


def test_what_others_cannot_do_does_not_go_out():
    changed = recipe.load("mistral", "tiny", ["model.layer.0.mixer.pattern=window(5, 0)"]) | {"vocab": 9}
    with pytest.raises(UserError, match="window"):
        every_family()["mistral"].config(changed)
    changed = recipe.load("starcoder", "tiny", ["model.layer.0.mixer.kv_heads=2"]) | {"vocab": 9}
    with pytest.raises(UserError, match="kv_heads"):
        every_family()["gpt_bigcode"].config(changed)


def test_mixed_layers_are_one_list():
    """Layers that look back differently are kinds that repeat, as few as will do."""
    config = LLAMA | {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 3}
    kinds = ["full_attention", "sliding_attention"] * 2
    layers = made(said("qwen2", config | {"layer_types": kinds}))["model"]["layer"]
    assert [layer["mixer"]["pattern"] for layer in layers] == ["causal", "causal & window(3)"]
    assert len(build(made(said("qwen2", config | {"max_window_layers": 3}))).stack.layers) == 4
