"""docs/decoders.md is true: its commands and its Python run, and its recipes are those that there are."""

import re
import shlex
from pathlib import Path

import pytest

from regard.cli import main
from regard.files import recipe
from tests.test_readme import commands_in

PAGE = (Path(__file__).parent.parent / "docs" / "decoders.md").read_text(encoding="utf-8")
SMALL = ["model.width=16", "model.depth=1", "model.heads=2"]
SMALL += [f"model.{side}.layer.0.feedforward.hidden=16" for side in ("encoder", "decoder")]


def test_every_parallel_recipe_is_on_the_page():
    parallel = {name for name in recipe.names() if "length" in recipe.load(name)["model"]}
    assert parallel <= set(re.findall(r"`([a-z-]+)`", PAGE))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decoders")
    rows = [f"{a} {b}\t{b} {a}" for a in "abcdefgh" for b in "ijklmnop"]
    (folder / "pairs.tsv").write_text("source\ttarget\n" + "\n".join(rows) + "\n")
    (folder / "asked.txt").write_text("a sentence\n")
    return folder


def test_commands_run(pairs, monkeypatch, capsys):
    """On a small file, with small models and few steps; then the example in Python, with one of these runs."""
    monkeypatch.chdir(pairs)
    commands = commands_in(PAGE)
    assert len(commands) == 13
    for command in commands:
        given = shlex.split(command)[1:]
        if given[0] == "train":
            at = given.index("--minutes")
            given[at : at + 2] = ["--steps", "4" if "--teacher" in given else "100", "--lr", "0.02"]
            given += [word for one in SMALL for word in ("--set", one)]
            if "--data" in given:
                given += ["--tokenizer", "characters"]
        if given[0] == "predict":
            given.insert(2, "asked.txt")
        assert main(given) == 0, (command, capsys.readouterr().err)
    capsys.readouterr()
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    exec(block, {})
    assert len(capsys.readouterr().out.splitlines()) >= 2
