"""Hugging Face folders from a stranger: whatever stands in them, a run or one sentence, and nothing half-written."""

import json
import math
import pickle
import shutil
import struct
import tomllib

import pytest
import tomli_w
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from regard.data import Tokenizer
from regard.data.masks import with_special_tokens

from .corpus import FAMILIES, NASTY, TEXTS, changed, damaged, dropped, hugging_face_folder, outcome, places

FUZZ = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
CONVERT = ("convert", "model", "out")


@pytest.fixture(scope="module")
def homes(tmp_path_factory):
    """By family, a folder with a good model in it, made when it is first asked for."""
    made = {}

    def home(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            hugging_face_folder(family, made[family]).rename(made[family] / "model")
            assert converted(made[family]) == ""
        return made[family]

    return home


def converted(home, *more):
    """What `regard convert` says; what it writes is whole or not there."""
    told = outcome(home, *CONVERT, *more)
    assert (home / "out" / "run.json").is_file() == (not told)
    shutil.rmtree(home / "out", ignore_errors=True)
    assert sorted(path.name for path in home.iterdir()) == ["model"]
    return told


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_of_config_json(homes, family):
    home = homes(family)
    path = home / "model" / "config.json"
    good = path.read_text()
    config = json.loads(good)
    try:
        for place in places(config):
            nasty = NASTY if family in ("mistral", "bert") else NASTY[::3]  # the others share their readers
            for made in (*(changed(config, place, value) for value in nasty), dropped(config, place)):
                path.write_text(json.dumps(made))
                converted(home)
    finally:
        path.write_text(good)


@pytest.mark.parametrize(
    ("family", "entries", "words"),
    [
        ("llama", {"max_position_embeddings": -5}, "max_position_embeddings: is -5, and should be at least 1"),
        ("llama", {"max_position_embeddings": "many"}, "max_position_embeddings: is 'many', and should be a whole"),
        ("mistral", {"sliding_window": -3}, "sliding_window: is -3, and should be at least 1"),
        ("mistral", {"sliding_window": 0}, "sliding_window: is 0, and should be at least 1"),
        ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps: is nan, and should be a number"),
        ("bert", {"layer_norm_eps": math.inf}, "layer_norm_eps: is inf, and should be a number"),
        ("bert", {"layer_norm_eps": 0}, "layer_norm_eps: is 0, and should be at least 1e-30"),
        ("llama", {"num_key_value_heads": 0}, "num_key_value_heads: is 0, and should be at least 1"),
        ("llama", {"num_key_value_heads": -1}, "num_key_value_heads: is -1, and should be at least 1"),
        ("gpt2", {"n_head": 5}, "width 12 is not divisible by 5 heads"),
        ("gpt2", {"n_head": None}, "n_head: is None, and should be a whole number"),
        ("gpt2", {"n_layer": 10**9}, "1,000,000,000 layers, and the weights are only 16 tensors"),
        ("gpt2", {"n_embd": 10**9}, "must be at most 131,072, not 1,000,000,000"),
        ("gpt2", {"n_embd": 3072}, "transformer.wte.weight is (31, 12), and config.json makes it (31, 3072)"),
        ("gpt2", {"architectures": "GPT2LMHeadModel"}, "architectures: is 'GPT2LMHeadModel', and should be a list"),
        ("gpt2", {"vocab_size": 10**30}, "holds a whole number of more than 64 bits"),
    ],
)
def test_what_was_accepted_in_silence(homes, family, entries, words):
    home = homes(family)
    path = home / "model" / "config.json"
    good = path.read_text()
    try:
        path.write_text(json.dumps(json.loads(good) | entries))
        assert words in converted(home)
    finally:
        path.write_text(good)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_every_file_damaged(homes, name):
    home = homes("gpt2")
    path = home / "model" / name
    good = path.read_bytes()
    try:
        for _, data in damaged(good):
            path.write_bytes(data)
            converted(home)
    finally:
        path.write_bytes(good)


@given(st.data())
@FUZZ
def test_random_damage(homes, data):
    home = homes("mistral")
    path = home / "model" / data.draw(st.sampled_from(["config.json", "model.safetensors"]))
    good = path.read_bytes()
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(bad), 3000)))
        piece = data.draw(
            st.binary(max_size=6) | st.sampled_from([b"null", b"-1", b"1e999", b"[]", b"{}", b'"', b"9" * 40])
        )
        bad[at : at + data.draw(st.sampled_from([0, 1, len(piece), 300]))] = piece
    try:
        path.write_bytes(bytes(bad))
        converted(home)
    finally:
        path.write_bytes(good)


def announced(size):
    """A safetensors file whose header speaks of a tensor of so many bytes, with little behind it."""
    header = {"transformer.wte.weight": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(64)


@pytest.mark.parametrize("data", [announced(10**10), announced(2**62), struct.pack("<Q", 2**63) + b"{}", bytes(8)])
def test_headers_that_announce_more_than_there_is(homes, data):
    home = homes("gpt2")
    path = home / "model" / "model.safetensors"
    good = path.read_bytes()
    try:
        path.write_bytes(data)
        assert "model.safetensors is damaged: " in converted(home)
    finally:
        path.write_bytes(good)


WEIGHT_MAPS = [
    None,
    [],
    5,
    "x",
    {},
    {"a": None},
    {"a": 3},
    {"a": ["model.safetensors"]},
    {"a": ""},
    {"a": "config.json"},
]


@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_weight_maps_that_are_none(homes, index):
    home = homes("gpt2")
    path = home / "model" / "model.safetensors"
    path.rename(home / "kept")
    try:
        (home / "kept").rename(home / "model" / "kept.bin")
        for places_ in WEIGHT_MAPS:
            (home / "model" / index).write_text(json.dumps({"weight_map": places_}))
            assert converted(home, "--pickle")
        (home / "model" / index).write_text("{}")
        assert "has no 'weight_map'" in converted(home, "--pickle")
    finally:
        (home / "model" / index).unlink()
        (home / "model" / "kept.bin").rename(path)


@pytest.mark.parametrize(
    "state",
    [
        {1: torch.ones(2)},
        {"a": torch.ones(3).to_sparse()},
        {"a": torch.ones(3, dtype=torch.complex128)},
        {"a": torch.ones(3, device="meta")},
        {"a": torch.ones(3, dtype=torch.complex64)},
        {"a": 5},
        [torch.ones(2)],
        {"state_dict": None},
        {"state_dict": {"a": torch.ones(2)}, "b": 3},
        torch.ones(3),
        None,
    ],
)
def test_pickles_that_are_no_tables_of_tensors(homes, state):
    home = homes("gpt2")
    path, kept = home / "model" / "model.safetensors", home / "model" / "kept.bin"
    path.rename(kept)
    try:
        torch.save(state, home / "model" / "pytorch_model.bin")
        assert converted(home, "--pickle")
        (home / "model" / "pytorch_model.bin").write_bytes(pickle.dumps(object()))
        assert "cannot be read safely" in converted(home, "--pickle")
    finally:
        (home / "model" / "pytorch_model.bin").unlink()
        kept.rename(path)


def test_the_folder_is_still_good(homes):
    assert converted(homes("gpt2")) == ""
    assert load_file(homes("gpt2") / "model" / "model.safetensors")


CHANGES = [  # of a run that came from elsewhere: its family, the file, the place, and what stands there
    ("gpt2", "run.json", ("origin", "config", "architectures"), 5),
    ("llama", "run.json", ("origin", "config", "architectures"), [True]),
    ("llama", "recipe.toml", ("model", "heads"), "x"),
    ("mistral", "recipe.toml", ("model", "layer", 0, "mixer", "pattern"), {"a": [1]}),
    ("clip", "recipe.toml", ("model", "text", "head"), []),
    ("llama", "recipe.toml", ("idea",), {"a": [1]}),
    ("llama", "recipe.toml", ("title",), []),
    ("gpt2", "recipe.toml", ("model", "embed"), True),
    ("gpt2", "recipe.toml", ("model", "depth"), 10**9),
]


@pytest.mark.parametrize(("family", "name", "place", "value"), CHANGES)
def test_a_converted_run_with_another_value(tmp_path, family, name, place, value):
    hugging_face_folder(family, tmp_path)
    words = with_special_tokens(Tokenizer.train("words", TEXTS))
    words.save(tmp_path / family / "tokenizer.json")
    assert outcome(tmp_path, "convert", family, "run") == ""
    path = tmp_path / "run" / name
    read, write = (json.loads, json.dumps) if name == "run.json" else (tomllib.loads, tomli_w.dumps)
    path.write_text(write(changed(read(path.read_text()), place, value)))
    (tmp_path / "labels.tsv").write_text("the cat\ta\na dog\tb\n" * 9)
    learn = ["train", "--from", "run", "--task", "classify", "--data", "labels.tsv", "--steps", "1", "--out", "out"]
    for arguments in (["convert", "run", "out"], ["show", "run"], ["show", "run", "--json"], learn):
        outcome(tmp_path, *arguments)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
