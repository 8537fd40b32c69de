"""`regard verify`: what it says of a recipe and of a part of one's own, sound or broken."""

import json
from pathlib import Path

import pytest

import regard
from regard import schema as parts
from regard.cli import main
from regard.files import recipe
from regard.verify import golden, laws, report

PARTS = Path(regard.__file__).parent / "parts"

MINE = """
title = "Mine"
idea  = "Two kinds of layer in turns."
vocab = 61
[model]
kind = "decoder"
width = 24
heads = 3
depth = 5
[[model.layer]]
mixer = "attention"
[[model.layer]]
mixer = { part = "attention", pattern = "causal & window(5)", position = "rotary" }
feedforward = { part = "mlp", hidden = 48 }
"""

ECHO = """
from typing import NamedTuple
import torch
from regard.core import Cost, Mixer

class Last(NamedTuple):
    x: torch.Tensor

class Echo(Mixer[Last]):
    def __init__(self, width: int):
        super().__init__()
        self.width, self.scale = width, torch.nn.Parameter(torch.ones(width))
    def start(self, context, capacity):
        return Last(self.scale.new_zeros(context.positions.shape[0], 1, self.width))
    def step(self, x, state, context):
        before = torch.cat((state.x, x), 1)
        return before[:, :-1] * self.scale, Last({last})
    def cost(self, length, past=0):
        return Cost(0, self.width * self.scale.element_size())
"""
RIGHT = "before[torch.arange(len(x)), context.lengths][:, None]"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parts, "user_folders", [])
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "mine.toml").write_text(MINE)
    return tmp_path


def said(capsys, arguments: list[str], code: int = 0) -> str:
    assert main(arguments) == code
    told = capsys.readouterr()
    assert told.err == ""
    return told.out


def test_verify(mine, capsys):
    text = said(capsys, ["verify", "mine.toml"])
    assert text.count("✓") == 15
    assert "names no golden" in text
    assert "all 15 hold" in text
    assert max(len(line) for line in text.splitlines()) <= 80
    data = json.loads(said(capsys, ["verify", "mine.toml", "--json", "--seed", "3"]))
    assert data["holds"]
    assert [finding["law"] for finding in data["sections"][0]["findings"]] == list(laws.laws_for(subject()))


def subject() -> laws.Subject:
    return laws.Subject(regard.build("mine.toml"))


def test_verify_takes_the_tiny_size(mine, capsys, monkeypatch):
    monkeypatch.setattr(
        report, "verify_recipe", lambda made, seed: iter([report.Section(str(made["model"]["width"]), iter(()))])
    )
    (mine / "sized.toml").write_text(MINE + "[size.tiny.model]\nwidth = 12\n[size.big.model]\nwidth = 48\n")
    assert "size tiny\n\n12" in said(capsys, ["verify", "sized.toml"])
    assert "size big\n\n48" in said(capsys, ["verify", "sized.toml", "--size", "big"])
    assert "mine.toml\n\n24" in said(capsys, ["verify", "mine.toml"])


def test_parity_is_reported(mine, capsys, monkeypatch):
    monkeypatch.setattr(laws, "laws_for", lambda subject: {"alone": laws.alone})
    system = next(system for system in sorted(golden.cases()) if golden.golden_files(system))
    (mine / "mine.toml").write_text(f'golden = ["{system}", "nosuch"]\n' + MINE)
    text = said(capsys, ["verify", "mine.toml"])
    assert f"✓  {system}-" in text
    assert "no golden file: there is no nosuch-*.safetensors" in text.replace("\n    ", " ")
    monkeypatch.setattr(golden, "cases", lambda: {})
    assert "holds a case for it" in " ".join(said(capsys, ["verify", "mine.toml"]).split())
    monkeypatch.setattr(golden, "cases", lambda: {system: lambda one: [laws.Finding("out", 1.0, 1e-5)]})
    assert f"1 of 2 broken: {system}-" in said(capsys, ["verify", "mine.toml"], 1)


def test_findings_come_one_by_one(mine, monkeypatch):
    """The first is there before the second is looked for."""
    ran = []
    tried = {name: (lambda subject, name=name: ran.append(name) or laws.Finding(name, 0.0, 1.0)) for name in "abc"}
    monkeypatch.setattr(laws, "laws_for", lambda subject: tried)
    section = next(report.verify_recipe(recipe.load("mine.toml")))
    assert next(section.findings).law == "a"
    assert ran == ["a"]


def test_verify_a_part_of_ones_own(mine, capsys):
    (mine / "echo.py").write_text(ECHO.replace("{last}", RIGHT))
    assert "mixer echo" in said(capsys, ["verify", "echo.py"])
    wrong = mine / "wrong"
    wrong.mkdir()
    (wrong / "echo.py").write_text(ECHO.replace("{last}", "x[:, -1:]"))  # forgets that rows are ragged
    parts.user_folders.clear()
    text = said(capsys, ["verify", "wrong/echo.py"], 1)
    assert "✗  cuts" in text
    assert "✓  cost" in text
    (mine / "wrong.toml").write_text(MINE.replace('"attention"\n', '"echo"\n', 1))
    parts.user_folders.clear()
    assert "✗  cuts" in said(capsys, ["verify", "wrong.toml", "--parts", "wrong"], 1)


def test_a_part_that_breaks_is_a_law_that_is_broken(mine, capsys):
    (mine / "echo.py").write_text(ECHO.replace("{last}", "x[:, :0] @ x"))
    text = " ".join(said(capsys, ["verify", "echo.py"], 1).split())
    assert "✗ cuts inf RuntimeError" in text
    assert "echo.py, line 17" in text
    assert "Traceback" not in text


KINDS = {
    "positions/rotary": "shift", "positions/sinusoidal": "alone", "patterns/window": "keeps", "norms/rms": "alone",
    "wirings/post": "alone", "scores/dot": "alone", "heads/classify": "alone", "embeds/tokens": "alone",
    "feedforwards/mlp": "alone",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_part(mine, capsys, monkeypatch, kind):
    """Each is tried in its slot, in every variant that it names."""
    monkeypatch.setattr(laws, "laws_for", lambda subject: {"alone": laws.alone})
    path = PARTS / f"{kind}.py"
    text = said(capsys, ["verify", str(path)])
    examples = next(found for contract in report.CONTRACTS if (found := parts.class_in(path, contract))).examples
    assert text.count(f"✓  {KINDS[kind]} ") == len(examples)


def test_a_pattern_that_forgets_too_early(mine, capsys, monkeypatch):
    monkeypatch.setattr(laws, "laws_for", lambda subject: {"alone": laws.alone})
    text = (PARTS / "patterns" / "window.py").read_text().replace("Window", "Hasty")
    (mine / "hasty.py").write_text(text.replace("now - key_at < self.size", "now - key_at < self.size - 1"))
    assert "✗  keeps" in said(capsys, ["verify", "hasty.py"], 1)
