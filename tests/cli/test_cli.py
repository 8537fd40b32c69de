"""The command line as its users meet it: what it prints, how wide, and how it ends."""

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import regard
from regard import schema as parts
from regard.cli import catalog, main
from regard.files import recipe
from regard.look import anatomy, sketch
from regard.look import recipe as picture
from regard.synonyms import RENAMED_FLAGS

NAMES = recipe.names()
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


def described(name: str, size: str | None = None, overrides: tuple[str, ...] = ()) -> anatomy.ModelSummary:
    made = recipe.load(name, size, overrides)
    made.setdefault("vocab", 1000)
    return anatomy.describe(sketch.build_without_weights(made))


def test_help_and_version(capsys):
    assert all(word in said(capsys, []) for word in ("systems", "show", "verify"))
    assert said(capsys, ["--version"]).strip() == f"regard {regard.__version__}"


def test_systems(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = said(capsys, ["systems"]).splitlines()
    assert max(len(line) for line in lines) <= 80
    assert [line.split()[0] for line in lines if line.split()[:1] != [] and line.split()[0] in NAMES] == NAMES
    rows = json.loads(said(capsys, ["systems", "--json"]))
    assert [row["name"] for row in rows] == NAMES
    assert all(row["idea"] and row["paper"] and row["year"] and row["sizes"] for row in rows)


@pytest.mark.parametrize("name", NAMES)
def test_the_table_of_parameters_is_true(name):
    """`regard systems --count > regard/recipes/parameters.json` writes it anew."""
    assert json.loads(catalog.COUNTS.read_text())[name] == catalog.count_parameters(name)


@pytest.mark.parametrize(
    "given",
    [[], ["--help"], ["train", "--help"], ["systems"], ["systmes"], ["show", "gtp2"], ["train", "gtp2"]],
    ids=str,
)
def test_torch_is_not_imported_to_print_text(given):
    code = f"import sys; from regard.cli import main; main({given}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.parametrize(("old", "new"), RENAMED_FLAGS.items())
def test_an_old_flag_is_told_its_new_name(old, new, capsys):
    assert main(["predict", "run", old]) == 2
    assert capsys.readouterr().err == f"regard: {old} is called {new}\n"


@pytest.mark.parametrize(
    ("old", "new"), [("train.batch=5", "train.batch_tokens"), ("decode.most=5", "decode.max_new_tokens")]
)
def test_an_old_key_is_told_its_new_name(old, new, tmp_path, capsys):
    (tmp_path / "pairs.tsv").write_text("a\tb\n" * 50)
    given = ["train", "transformer", "--size", "tiny", "--data", str(tmp_path / "pairs.tsv"), "--steps", "1"]
    assert main([*given, "--out", str(tmp_path / "run"), "--set", old]) == 2
    assert f"did you mean '{new}'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_parameters(name):
    """Every size of every recipe builds. Counted by kinds of layer and without weights, its parameters are those of a
    built model, and of the picture in all."""
    for size in recipe.sizes(name):
        made = recipe.load(name, size)
        made.setdefault("vocab", 1000)
        whole = sketch.build_without_weights(made)
        assert all(p.is_meta for p in whole.parameters())
        counted = sketch.count_parameters(whole)
        assert counted > 0
        assert sketch.parameters_of_recipe(made) == counted
        if size == "tiny":
            assert sketch.count_parameters(regard.build(made)) == counted
            drawn = anatomy.describe(whole)
            boxes = [box for tower in drawn.towers for box in (*tower.before, *tower.after)]
            layers = sum(group.parameters for tower in drawn.towers for group in tower.groups)
            assert sum(box.parameters for box in boxes) + layers + drawn.head.parameters == counted


@pytest.mark.parametrize("name", NAMES)
def test_pictures_fit(name, monkeypatch):
    monkeypatch.setattr(anatomy, "LENGTHS", (32, 64))
    drawn = described(name, "tiny")
    for width in (80, 100):
        text = picture.text(drawn, width)
        assert max(len(line) for line in text.splitlines()) <= width
        assert text.startswith(drawn.title)
        for tower in drawn.towers:
            assert tower.side in text
            assert all(f"{box.name} " in text and box.part in text for box in tower.boxes)


def test_layers_that_come_again_are_drawn_once(mine, capsys):
    drawn = described("mine.toml")
    groups = drawn.towers[0].groups
    assert [(group.times, len(group.layers)) for group in groups] == [(2, 2), (1, 1)]
    assert drawn.patterns == {"causal": ["decoder mixer"], "causal & window(5)": ["decoder mixer"]}
    assert [g.part for g in drawn.grows] == ["attention", "attention"]
    text = said(capsys, ["show", "mine.toml"])
    assert "layer × 2" in text
    assert "causal & window(5)" in text
    assert "hidden 48" in text
    assert "vocabulary 61" in text
    shared = described("mine.toml", overrides=("model.share='layers'",))
    assert shared.towers[0].groups[0].parameters * 2 == groups[0].parameters
    assert "one set of weights" in picture.text(shared)


def test_costs_are_the_models_own(mine):
    drawn = described("mine.toml")
    model = regard.build("mine.toml")
    for spent in drawn.spent:
        assert spent.token == model.cost(1, spent.length).flops
        assert spent.whole == model.cost(spent.length).flops // spent.length
        assert spent.state == model.cost(spent.length).state
    assert [spent.length for spent in drawn.spent] == [512, 8192]
    limited = described("transformer-decoder", "tiny", ("model.embed.position={part='learned', length=700}",))
    assert limited.spent[0].token
    assert limited.spent[1] == anatomy.CostAtLength(8192, None, None, None, None, "its maximum length is 700")


def test_show_for_programs(mine, capsys):
    data = json.loads(said(capsys, ["show", "mine.toml", "--json", "--vocab", "7,9", "--set", "model.depth=1"]))
    assert data["vocab"] == [7, 9]
    assert data["towers"][0]["depth"] == 1
    assert data["parameters"] == sketch.count_parameters(
        regard.build("mine.toml", vocab=(7, 9), overrides=["model.depth=1"])
    )


@pytest.mark.parametrize("name", ["transformer", "mine.toml"])
def test_drawings(mine, name, capsys):
    out = said(capsys, ["show", name, "--png", "drawn.png", *(["--size", "tiny"] if name == "transformer" else [])])
    assert out.rstrip().endswith("drawn in drawn.png")
    assert (mine / "drawn.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in mine.iterdir()) == ["drawn.png", "mine.toml"]


def test_unknown_words(capsys):
    for arguments, words in (
        (["shwo"], "Did you mean 'show'?"),
        (["show"], "Missing argument"),
        (["show", "transformer", "--siz", "tiny"], "--size"),
        (["verify", "transformer", "--seed", "x"], "--seed"),
    ):
        assert main(arguments) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert words in told


def test_interrupted(capsys, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe, "names", stop)
    assert main(["systems"]) == 130
    assert capsys.readouterr().err == "regard: stopped\n"


def test_no_more_memory(capsys, monkeypatch):
    """As torch itself says it, on a CPU."""
    monkeypatch.setattr(recipe, "names", lambda: torch.empty(1 << 50))
    assert main(["systems"]) == 2
    assert capsys.readouterr().err.startswith("regard: there is not enough memory")


def test_as_a_program(mine):
    """The installed command: exit codes, no stack trace, and no complaint when the reader leaves early."""
    command = str(Path(sys.executable).parent / "regard")
    lost = subprocess.run([command, "show", "nosuch"], capture_output=True, text=True)
    assert (lost.returncode, lost.stdout) == (2, "")
    assert lost.stderr.startswith("regard: unknown recipe 'nosuch'")
    early = subprocess.run(f"{command} show mine.toml | head -1", shell=True, capture_output=True, text=True)
    assert (early.stdout, early.stderr) == ("Mine\n", "")


def test_a_reader_that_has_seen_enough_is_no_error(monkeypatch):
    def closed(*_, **__):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    for name in ("stdout", "stderr"):  # typer puts others in their place
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr("regard.cli.catalog.typer.echo", closed)
    assert main(["systems", "--json"]) == 0
