"""`regard doctor`: what it says of a machine with kernels, and of one without; and of the ops of a model."""

import json
import os
import subprocess
import sys

import pytest
import torch

from regard import build
from regard.bases.attend import Attend
from regard.cli import main
from regard.doctor import trace_ops
from regard.native.build import load_kernels
from regard.ops import dispatch

needs_kernels = pytest.mark.skipif(load_kernels() is None, reason="there is no compiler")


def test_facts_as_json(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["machine", "software", "kernels", "advice"]
    assert found["software"]["torch"] == torch.__version__
    assert found["kernels"]["compiled"] == (load_kernels() is not None)
    assert 1 <= found["machine"]["cores"] <= os.cpu_count()


def test_facts_as_text(capsys, monkeypatch):
    monkeypatch.setattr("regard.doctor._cores", lambda: 1)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == ["machine", "software", "kernels", "advice"]
    assert "  cores             1" in lines


def test_a_machine_without_a_compiler_is_told_to_install_one(tmp_path):
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "regard", "doctor"], env=env, capture_output=True, text=True)
    assert done.returncode == 0
    assert "  compiled          no" in done.stdout
    assert "slower than they could be: there is no C++ compiler (c++, g++, clang++); install one" in done.stdout


def tiny(name):
    """A model, and a way to ask what its ops run on: (what, why) for each op of a phase."""
    torch.manual_seed(0)
    model = build(name, size="tiny", vocab=61)

    def ask(phase):
        found: dict[str, list[tuple[str, str]]] = {}
        for row in trace_ops(model, 3, 13)[phase]:
            found.setdefault(row["op"], []).append((row["runs_on"], row["why"]))
        return found

    return model, ask


@needs_kernels
def test_gpt2_decodes_in_fused_steps():
    _, ask = tiny("gpt2")
    found = ask("decoding")
    assert found["fused step"] == [("separate ops", "a step of several positions"), ("regard", "")]
    assert found["embedding"] == [("torch", "regard has no kernel for it")]
    assert ("torch", "the part calls torch.nn.Linear itself") in found["linear"]


@needs_kernels
def test_a_hooked_module_is_named():
    model, ask = tiny("gpt2")
    with_hook = model.stack.layers[1].branches["feedforward"].into
    hook = with_hook.register_forward_hook(lambda *given: None)
    path = next(path for path, module in model.stack.named_modules() if module is with_hook)
    assert ask("decoding")["fused step"] == [
        ("separate ops", "a step of several positions"),
        ("separate ops", f"{path} has a hook or a forward of its own"),
    ]
    assert ("torch", "a module in it has a hook, or a method of its own") in ask("training")["mlp"]
    hook.remove()
    assert ("regard", "") in ask("decoding")["fused step"]
    assert ask("training")["mlp"] == [("regard", "")]


def test_kernels_that_are_switched_off():
    _, ask = tiny("gpt2")
    with dispatch.disabled():
        for phase in ("training", "decoding"):
            found = ask(phase)
            assert not any(what == "regard" for rows in found.values() for what, _ in rows)
            off = "the kernels are switched off in this thread"
            assert all(("torch", off) in found[op] for op in (["mlp"] if phase == "training" else ["linear"]))


@needs_kernels
def test_a_mixer_that_declares_nothing():
    _, ask = tiny("retnet")
    assert ("separate ops", "the mixer 'retention' declares nothing to fuse") in ask("decoding")["fused step"]
    assert ask("training")["gated linear attention"] == [("torch", "regard has no kernel for it")]


@needs_kernels
def test_a_bias_that_learns():
    torch.manual_seed(0)
    model = build("t5", size="tiny", vocab=61)
    for module in model.modules():
        if isinstance(module, Attend):
            module.dropout = 0.0
    rows = trace_ops(model, 3, 13)["training"]
    assert {
        "op": "attention",
        "runs_on": "torch",
        "why": "the position's bias learns, and the kernel has no gradient of it",
    } in [{key: row[key] for key in ("op", "runs_on", "why")} for row in rows]


def test_a_model_that_does_not_decode():
    torch.manual_seed(0)
    found = trace_ops(build("bert", size="tiny", vocab=61), 3, 13)
    assert found["decoding"] is None
    assert found["training"]


def test_nothing_is_left_behind():
    model, ask = tiny("gpt2")
    model.eval()
    before = {name: p.clone() for name, p in model.named_parameters()}
    ask("training")
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_what_is_decided_is_recorded_only_while_asked():
    x = torch.randn(2, 3)
    with dispatch.recording() as seen:
        dispatch.kernels_for(x, op="some op", unless="it rains")
        dispatch.kernels_for(x, op="some op", unless="it rains")
        with dispatch.recording() as inside:
            dispatch.note("another")
        dispatch.kernels_for(x)  # nobody's
    dispatch.kernels_for(x, op="some op", unless="it rains")
    assert seen == {("some op", "torch", "it rains"): 2}
    assert inside == {("another", "regard", ""): 1}


def test_ops_of_a_recipe(capsys):
    assert main(["doctor", "gpt2", "--size", "tiny", "--rows", "3", "--length", "13", "--json"]) == 0
    ops = json.loads(capsys.readouterr().out)["ops"]
    assert (ops["of"], ops["rows"], ops["length"]) == ("gpt2", 3, 13)
    assert {"op": "embedding", "runs_on": "torch", "why": "regard has no kernel for it", "calls": 4} in ops["decoding"]
    assert main(["doctor", "gpt2", "--size", "tiny", "--rows", "3", "--length", "13"]) == 0
    told = capsys.readouterr().out
    for phase in ("training", "decoding"):
        assert f"{phase}: gpt2, 3 rows of 13 positions" in told
        assert all(row["op"] in told for row in ops[phase])


def test_bad_names_are_told_in_one_sentence(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    for name, sentence in [
        (str(tmp_path / "nowhere"), "there is neither a run nor a recipe"),
        (str(tmp_path / "empty"), "is not a run folder: it holds no run.json"),
        ("gtp2", "gpt2"),
    ]:
        assert main(["doctor", name]) == 2
        told = capsys.readouterr()
        assert sentence in told.err
        assert told.err.count("\n") == 1
        assert not told.out


def test_a_run_with_settings_of_its_own(capsys, tmp_path):
    """Its precision and its beam count."""
    rows = [f"{a} {b}\t{b} {a}" for a in "abcdefgh" for b in "abcdefgh"]
    (tmp_path / "pairs.tsv").write_text("\n".join(rows) + "\n")
    given = ["train", "transformer", "--size", "tiny", "--data", str(tmp_path / "pairs.tsv"), "--tokenizer", "words"]
    given += ["--steps", "1", "--set", "model.width=16", "--set", "model.depth=1", "--out", str(tmp_path / "run")]
    assert main([*given, "--set", "train.precision=bfloat16", "--set", "decode.beam=3"]) == 0
    capsys.readouterr()
    assert main(["doctor", str(tmp_path / "run"), "--rows", "3", "--length", "13", "--json"]) == 0
    ops = json.loads(capsys.readouterr().out)["ops"]
    why = {row["op"]: row["why"] for row in ops["training"]}
    assert why["mlp"] == "autocast chooses the dtype of every operation"
    assert "top-k of logits" in {row["op"] for row in ops["decoding"]}
