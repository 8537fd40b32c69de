"""Strings of a stranger on a terminal: no escape sequence of theirs is printed, and no markup of theirs is read."""

import io
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w

import regard
from regard.cli import main
from regard.errors import UserError, printable

from .corpus import CONTROL, ESCAPES, hugging_face_folder, outcome, text_run

NAMED = ESCAPES.replace("[/x]", "")  # a name may not look like a path


@pytest.fixture
def home(tmp_path):
    """A run that is whole, with such strings wherever it may have any."""
    run = text_run(tmp_path / "run")
    told = json.loads((run / "run.json").read_text())
    (run / "data.txt").write_text("the cat\n" * 30)
    texts = dict.fromkeys(("recipe", "run", "size", "task", "origin", "columns", "header", "tokenizer"), ESCAPES)
    told["job"] |= texts | {"overrides": [ESCAPES], "metrics": [ESCAPES]}
    told |= {"machine": {ESCAPES: ESCAPES}, "labels": [ESCAPES], "chosen": [{ESCAPES: ESCAPES}]}
    told["sessions"] = [{"command": [ESCAPES], "time": ESCAPES, "versions": {ESCAPES: ESCAPES}}]
    (run / "run.json").write_text(json.dumps(told))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 3, "final": {ESCAPES: 1.5}}) + "\n")
    recipe = tomllib.loads((run / "recipe.toml").read_text())
    layers = recipe["model"]["layer"]
    for layer in layers if isinstance(layers, list) else [layers]:
        layer[NAMED] = layer.pop("mixer")
    recipe |= {"title": ESCAPES, "idea": ESCAPES, "paper": ESCAPES}
    recipe["train"] = recipe.get("train", {}) | {"metric": ESCAPES}
    (run / "recipe.toml").write_text(tomli_w.dumps(recipe))
    regard.save(regard.build(run / "recipe.toml"), run)
    return tmp_path


COMMANDS = {
    "show": ["show", "run"],
    "show as JSON": ["show", "run", "--json"],
    "profile": ["profile", "run", "--rows", "1", "--length", "4"],
    "profile as JSON": ["profile", "run", "--rows", "1", "--length", "4", "--json"],
    "evaluate": ["evaluate", "run"],
    "evaluate on data": ["evaluate", "run", "--data", "run/data.txt"],
    "evaluate as JSON": ["evaluate", "run", "--data", "run/data.txt", "--json"],
    "convert": ["convert", "run", "out"],
    "export": ["export", "run", "out"],
    "predict": ["predict", "run", "run/texts.txt"],
    "verify": ["verify", "run/recipe.toml"],
    "train from": ["train", "--from", "run", "--data", "run/data.txt", "--steps", "1", "--out", "out"],
    "resume": ["train", "--resume", "run"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_escape_of_a_run_is_printed(home, command):
    outcome(home, *COMMANDS[command])


def test_no_escape_of_a_model_folder_is_printed(tmp_path):
    folder = hugging_face_folder("gpt2", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for change in ({"model_type": ESCAPES}, {"activation_function": ESCAPES}, {ESCAPES: ESCAPES}):
        (folder / "config.json").write_text(json.dumps(config | change))
        outcome(tmp_path, "convert", "gpt2", "out")


@pytest.mark.parametrize("name", ["pairs.tsv", "pairs.csv", "data.jsonl", "tags.conll"])
def test_no_escape_of_data_is_printed(tmp_path, name):
    rows = {
        "pairs.tsv": f"{ESCAPES}\tb\tc\n" * 3,
        "pairs.csv": f"{ESCAPES},b,c\n" * 3,
        "data.jsonl": f"{json.dumps({ESCAPES: ESCAPES})}\n" * 3,
        "tags.conll": f"word\t{ESCAPES}\n\n" * 3,
    }
    (tmp_path / name).write_text(rows[name], newline="")
    outcome(tmp_path, "train", "--data", name, "--steps", "1", "--out", "out")


def test_paths_that_look_like_markup(tmp_path, monkeypatch):
    folder = tmp_path / "a[" / "x]"
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text("the cat sat on the mat\n" * 60)
    small = [word for one in ("width=8", "heads=2", "depth=1") for word in ("--set", f"model.{one}")]
    small += ["--set", "train.context_length=8", "--tokenizer", "characters"]
    given = ["transformer-decoder", "--size", "tiny", *small, "--data", "a[/x]/text.txt", "--out", "a[/x]/run"]
    assert outcome(tmp_path, "train", *given, "--steps", "1") == ""
    assert outcome(tmp_path, "evaluate", "a[/x]/run") == ""
    monkeypatch.chdir(tmp_path)
    assert main(["show", "a[/x]/run", "--png", "a[/x]/run.png"]) == 0


def test_halves_of_characters(home):
    """JSON may hold half a surrogate pair, which no terminal and no file takes."""
    path = home / "run" / "run.json"
    told = json.loads(path.read_text())
    told["job"] |= {"recipe": "\ud800", "data": "\udfff"}
    path.write_text(json.dumps(told))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONIOENCODING": "utf-8"}
    for arguments in (["show", "run"], ["show", "run", "--json"], ["evaluate", "run"]):
        command = [sys.executable, "-m", "regard", *arguments]
        done = subprocess.run(command, cwd=home, capture_output=True, text=True, env=environment)
        assert done.returncode in (0, 2), done.stderr
        assert "Traceback" not in done.stderr
        if "--json" in arguments:
            assert json.loads(done.stdout)["recipe"] == "\ud800"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_answers_on_a_terminal(tmp_path, monkeypatch, stream):
    """A model may be made to say anything. A file gets it as it is, a terminal does not."""
    from regard.tasks.run import Run

    monkeypatch.setattr(Run, "_text", lambda self, one, ids: ESCAPES[: len(ids) * 99])
    text_run(tmp_path / "run")
    for out in (Terminal(), io.StringIO()):
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", out)
            assert main(["predict", str(tmp_path / "run"), str(tmp_path / "run" / "texts.txt"), stream]) == 0
        assert bool(CONTROL.search(out.getvalue())) is not out.isatty()


def test_printable():
    assert printable("one\n\ttwo \u00e9\u4e2d") == "one\n\ttwo \u00e9\u4e2d"
    assert printable("\x1b[2J\x9b") == "\\u001b[2J\\u009b"
    assert not CONTROL.search(printable(ESCAPES + "\ud800"))
    assert ESCAPES in str(UserError(ESCAPES))  # a program may want it whole
