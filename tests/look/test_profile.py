"""Profiles of time and memory: every part is labeled, and everything is counted once."""

import json

import pytest
import torch

from regard.cli import main
from regard.core import build
from regard.files import recipe as recipes
from regard.look.profile import OTHER, PartLabels, profile_decoding, profile_training

SMALL = ["model.width=24", "model.heads=2", "model.depth=2"]


def made(name: str, *more: str, vocab: int = 61):
    recipe = recipes.load(name, None, [*SMALL, *more])
    recipe["vocab"] = recipe.get("vocab", vocab)
    return build(recipe)


def test_every_part_of_a_transformer_has_its_time():
    model = made("transformer", "model.dropout=0.1")
    step = profile_training(model, 3, 11)
    parts = {row.part: row for row in step.rows}
    for part in ("encoder mixer attention", "decoder cross attention", "decoder feedforward mlp", "decoder norm layer"):
        assert parts[part].forward > 0
        assert parts[part].backward > 0, part
        assert parts[part].kept > 0
    assert parts["optimizer adam"].backward == 0
    assert {"loss", "embed tokens", "source embed tokens"} <= parts.keys()
    whole = sum(row.forward + row.backward for row in step.rows)
    assert whole == pytest.approx(step.seconds)
    assert parts[OTHER].forward + parts[OTHER].backward < 0.5 * whole
    assert step.tokens == 33
    assert step.memory["kept"] == sum(row.kept for row in step.rows)
    assert step.memory["optimizer"] >= 2 * step.memory["weights"]


def test_a_decoding_step_has_no_backward_and_tells_the_state():
    model = made("gpt2")
    step = profile_decoding(model, 3, 11)
    assert all(row.backward == 0 for row in step.rows)
    parts = {row.part: row for row in step.rows}
    assert step.memory["state"] == parts["decoder mixer attention"].kept > 0
    assert "head vocabulary" in parts


def test_what_waits_is_counted_once():
    """Saved tensors count for the part that saves them first; weights do not count."""
    labels = PartLabels(made("gpt2"))
    x = torch.randn(3, 7, requires_grad=True)
    with labels.saved_bytes() as kept, labels.scope("one"):
        held = x * 2
        one = held.square()
        with labels.scope("two"):
            two = held.exp() * held
    assert kept == {"one": 3 * 7 * 4, "two": 3 * 7 * 4}
    assert one.grad_fn is not None
    assert two.grad_fn is not None


def test_parts_are_as_before():
    model = made("gpt2")
    tokens = torch.arange(8)[None]
    model.eval()
    before = model(tokens)
    profile_training(model, 2, 5)
    profile_decoding(model, 2, 5)
    model.eval()
    assert "forward" not in vars(model.stack.layers[0].branches["mixer"])
    assert "step" not in vars(model.stack.layers[0].branches["mixer"])
    assert before.shape == model(tokens).shape


@pytest.mark.parametrize("name", ["retnet", "rwkv4", "bert", "reformer", "clip", "vit", "whisper", "xlnet", "gat"])
def test_other_kinds(name, capsys):
    small = ["--size", "tiny"] if "tiny" in recipes.sizes(name) else [w for one in SMALL for w in ("--set", one)]
    assert main(["profile", name, *small, "--vocab", "61", "--rows", "2", "--length", "9", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["training step"]["rows"]


def test_the_command(tmp_path, capsys):
    sets = [word for one in SMALL for word in ("--set", one)]
    png = tmp_path / "p.png"
    assert main(["profile", "gpt2", *sets, "--vocab", "61", "--rows", "2", "--length", "9", "--png", str(png)]) == 0
    out = capsys.readouterr()
    assert "decoder mixer attention" in out.out
    assert "training step" in out.out
    assert "decoding step" in out.out
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert out.err == ""


def test_bad_input(tmp_path, capsys):
    assert main(["profile", "gtp2"]) == 2
    assert "gpt2" in capsys.readouterr().err
    assert main(["profile", "gpt2", "--png", str(tmp_path / "no" / "p.png")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["profile", "gpt2", "--device", "abacus"]) == 2
    assert "there is no device 'abacus' here" in capsys.readouterr().err
