"""`regard show RUN`: what a run folder holds, and how it came to be."""

import json

import pytest

from regard.cli import main

SMALL = ["--set", "model.width=16", "--set", "model.heads=2", "--set", "model.depth=1", "--batch-tokens", "256"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("show")
    pairs = folder / "pairs.tsv"
    pairs.write_text("source\ttarget\n" + "".join(f"word {n}\tWort {n}\n" for n in range(200)))
    given = ["--data", str(pairs), "--steps", "3", "--lr", "0.004", "--metric", "exact", "--out", str(folder / "run")]
    assert main(["train", "transformer", "--size", "tiny", *SMALL, *given, "--json"]) == 0
    return folder / "run"


def test_a_run_is_shown(run, capsys):
    capsys.readouterr()
    assert main(["show", str(run)]) == 0
    told = capsys.readouterr().out
    for word in ("finished", "transformer, size tiny", str(run.parent / "pairs.tsv"), "lr 0.004", "batch_tokens 256",
                 "loss ", "exact ", "regard", "torch", "parameters", "encoder, 1 layer"):  # fmt: skip
        assert word in told, word
    assert "momentum" not in told


def test_neither_a_recipe_nor_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["show", "runs/nope"]) == 2
    assert capsys.readouterr().err == "regard: there is neither a recipe nor a run 'runs/nope'\n"


def test_a_run_is_shown_to_programs(run, capsys):
    capsys.readouterr()
    assert main(["show", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["run"] == str(run)
    assert told["finished"]
    assert told["recipe"] == "transformer"
    assert told["size"] == "tiny"
    assert told["data"]["data"] == str(run.parent / "pairs.tsv")
    assert told["train"]["lr"] == 0.004
    assert told["step"] == 3
    assert set(told["metrics"]) == {"loss", "perplexity", "exact"}
    assert told["parameters"] > 1000
    assert told["sessions"][0]["versions"]["torch"]
    assert told["model"]["kind"] == "encoder-decoder"


def test_what_is_missing_is_not_shown(run, tmp_path, capsys):
    """A run that has only just begun, or that was brought from elsewhere, tells less."""
    for name in ("recipe.toml", "tokenizer.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    for about in ({}, {"origin": {"family": "bert"}}):
        (tmp_path / "run.json").write_text(json.dumps(about))
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "dev": {"loss": null}}\nhalf a l')
        assert main(["show", str(tmp_path)]) == 0, about
        assert "not finished" in " ".join(capsys.readouterr().out.split())
        assert main(["show", str(tmp_path), "--json"]) == 0
        capsys.readouterr()


def test_wrong_types_are_told(run, tmp_path, capsys):
    (tmp_path / "recipe.toml").write_bytes((run / "recipe.toml").read_bytes())
    (tmp_path / "run.json").write_text(json.dumps({"job": None, "sessions": [None, 3], "parameters": "many"}))
    assert main(["show", str(tmp_path)]) == 2
    assert "run.json" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--size", "tiny"], ["--set", "model.width=3"], ["--vocab", "9"]])
def test_a_run_has_its_size(run, capsys, more):
    assert main(["show", str(run), *more]) == 2
    assert "a run folder has its size already" in capsys.readouterr().err


def test_a_folder_that_is_no_run(tmp_path, capsys):
    assert main(["show", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
