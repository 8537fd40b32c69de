"""Folders that are not what they should be: one sentence each, and nothing half-written."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from regard.cli import main
from regard.convert import convert
from regard.core import UserError

CONFIG = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 31, "n_positions": 16, "n_embd": 12,
    "n_layer": 1, "n_head": 3, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """A GPT-2 in the Hugging Face layout, made without transformers."""
    run, out = tmp_path / "first", tmp_path / "theirs"
    sets = ["model.width=12", "model.heads=3", "model.depth=1", "model.embed.position.length=16"]
    regard.save(regard.build("gpt2", vocab=31, overrides=sets), run)
    (run / "run.json").write_text(json.dumps({"job": {"recipe": "gpt2"}}))
    convert(run, out)
    return out


def refused(folder, match, **asked):
    target = folder.parent / "run"
    with pytest.raises(UserError, match=match):
        convert(folder, target, **asked)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["first", "theirs"]


def change(folder, **entries):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_a_run_trained_here_goes_out_and_comes_back(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    assert {key: config[key] for key in CONFIG} == CONFIG
    told = convert(folder, tmp_path / "again")
    assert "no tokenizer" in told.note
    first, again = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_no_config(folder):
    (folder / "config.json").unlink()
    refused(folder, r"theirs holds no config.json$")


def test_a_config_that_is_none(folder):
    (folder / "config.json").write_text("{")
    refused(folder, r"config.json cannot be read: ")
    (folder / "config.json").write_text("[]")
    refused(folder, r"config.json is no table")


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"model_type": "gpt3"}, r"says model_type 'gpt3', which regard does not read; did you mean 'gpt2'"),
        ({"model_type": None}, r"config.json says no model_type, which regard does not read"),
        ({"architectures": ["GPT2ForDance"]}, r"architecture 'GPT2ForDance'; of a gpt2, regard reads GPT2LMHeadModel"),
        ({"scale_attn_by_inverse_layer_idx": True}, r"scale_attn_by_inverse_layer_idx = True, and regard reads a gpt2"),
        ({"activation_function": "gelu_nw"}, r"activation_function = 'gelu_nw', which regard does not know"),
        ({"n_embd": 15}, r"the tensor transformer.wte.weight is \(31, 12\), and config.json makes it \(31, 15\)"),
        ({"n_layer": 2}, r"the tensor transformer.h.1.ln_1.weight \(12,\) is missing"),
        ({"n_head": 5}, r"width 12 is not divisible by 5 heads"),
    ],
)
def test_a_config_that_does_not_fit(folder, entries, match):
    change(folder, **entries)
    refused(folder, match)


def test_a_tensor_too_few_and_too_many(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"transformer.h.0.extra": torch.zeros(3)}, path)
    refused(folder, r"the tensor transformer.h.0.extra \(3,\) is one too many")
    del tensors["transformer.h.0.mlp.c_fc.bias"]
    save_file(tensors, path)
    refused(folder, r"the tensor transformer.h.0.mlp.c_fc.bias \(48,\) is missing")


def test_a_tied_tensor_that_differs(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["transformer.wte.weight"].clone()}, path)
    convert(folder, folder.parent / "run")
    save_file(tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1}, path)
    with pytest.raises(UserError, match=r"lm_head.weight should be a copy of transformer.wte.weight, and differs"):
        convert(folder, folder.parent / "other")


def test_a_damaged_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(folder, r"model.safetensors is damaged: ")


def test_shards(folder):
    path = folder / "model.safetensors"
    places = dict.fromkeys(load_file(path), "model-1.safetensors")
    path.rename(folder / "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places | {"transformer.ln_f.bias": "model-2.safetensors"}}))
    refused(folder, r"names the file 'model-2.safetensors', which is not there")
    index.write_text(json.dumps({"weight_map": places}))
    convert(folder, folder.parent / "run")


class Bomb:
    def __reduce__(self):
        return (print, ("boom",))


def test_a_pickle_is_refused_and_read_safely_when_asked(folder, capsys):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    refused(folder, r"pytorch_model.bin is a pickle, which may run code when it is read: .* say --pickle")
    convert(folder, folder.parent / "run", pickle=True)
    with open(folder / "pytorch_model.bin", "wb") as file:
        pickle.dump({"a": Bomb()}, file)
    with pytest.raises(UserError, match=r"pytorch_model.bin cannot be read safely: "):
        convert(folder, folder.parent / "other", pickle=True)
    assert "boom" not in capsys.readouterr().out


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, r"theirs holds no weights: neither model.safetensors nor ")


def test_a_target_that_is_there(folder):
    with pytest.raises(UserError, match=r"first is there already: name a new folder"):
        convert(folder, folder.parent / "first")


def test_a_run_that_has_left_its_family(folder, tmp_path):
    run = tmp_path / "local"
    regard.save(
        regard.build("gpt2", "tiny", vocab=31, overrides=["model.layer.0.mixer.pattern=causal & window(4)"]), run
    )
    (run / "run.json").write_text(json.dumps({"job": {"recipe": "gpt2"}}))
    with pytest.raises(UserError, match=r"model.layer.0.mixer.pattern is 'causal & window\(4\)' here, and a gpt2 has "):
        convert(run, tmp_path / "out")
    (run / "run.json").write_text(json.dumps({"job": {"recipe": "retnet"}}))
    with pytest.raises(UserError, match=r"the recipe 'retnet' has no Hugging Face family"):
        convert(run, tmp_path / "out")


def test_the_command(folder, tmp_path, capsys):
    assert main(["convert", str(folder), str(tmp_path / "a"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["family"] == "gpt2"
    assert main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "b")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_texts_need_a_tokenizer(folder, tmp_path):
    convert(folder, tmp_path / "run")
    with pytest.raises(UserError, match=r"holds no tokenizer.json, and texts cannot be read without one"):
        regard.load(tmp_path / "run")
    assert regard.restore(tmp_path / "run").vocab == 31
