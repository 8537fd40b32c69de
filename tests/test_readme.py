"""The README is true: its table is what there is, its commands run, its Python runs."""

import re
import shlex
from pathlib import Path

import pytest

from regard.cli import main
from regard.files import recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh.md").read_text(encoding="utf-8")


def test_the_systems_are_what_there_is():
    section = README[README.index("## Systems") : README.index("## Where things are")]
    rows = re.findall(r"^\| [^|]+ \| (.+) \|$", section, re.M)
    assert sorted(name for row in rows for name in re.findall(r"`([a-z0-9-]+)`", row)) == sorted(recipe.names())


def test_the_page_of_systems_is_what_there_is(capsys):
    """If not: regard systems --markdown > docs/systems.md"""
    assert main(["systems", "--markdown"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "systems.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", [README, CHINESE], ids=["README.md", "README.zh.md"])
def test_links_lead_somewhere(text):
    links = re.findall(r"\]\(([^)#:]+)\)|src=\"([^\"]+)\"", text)
    assert links
    assert [one or two for one, two in links if not (ROOT / (one or two)).exists()] == []


def commands_in(text: str) -> list[str]:
    """The commands of a page, without comments; those that bring weights are in test_weights_page.py."""
    text = text.partition("## Bring your weights")[0]
    return re.findall(r"^(?:echo .*\| )?\.venv/bin/(regard .+?)(?:\s+#.*)?$", text, re.M)


def test_the_chinese_page_has_the_same_commands():
    assert commands_in(CHINESE) == commands_in(README)


def test_commands_run(tmp_path, monkeypatch, capsys):
    """The training commands of the page, on a small file, with a small model and few steps."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{a} {b}\t{b} {a}" for a in "abcdefgh" for b in "ijklmnop"]
    Path("pairs.tsv").write_text("source\ttarget\n" + "\n".join(rows) + "\n")
    commands = commands_in(README)
    assert [command.split()[1] for command in commands] == [
        "train",
        "predict",
        "evaluate",
        "train",
        "profile",
        "doctor",
        "export",
        "export",
    ]
    Path("asked.txt").write_text("a sentence\n")
    for number, command in enumerate(commands):
        given = shlex.split(command)[1:]
        if "--minutes" in given:
            at = given.index("--minutes")
            given[at : at + 2] = ["--steps", str(3 + number)]
        if number == 0:
            given += ["--set", "model.width=16", "--set", "model.depth=1", "--vocab", "280"]
        if given[0] == "profile":
            given += ["--rows", "2", "--length", "8"]
        if given[0] == "predict":
            given.insert(2, "asked.txt")
        assert main(given) == 0, command


def test_python_runs(tmp_path, monkeypatch):
    import regard

    (block,) = re.findall(r"```python\n(.*?)```", README, re.S)
    build = next(line for line in block.splitlines() if "regard.build" in line)
    names: dict = {"regard": regard}
    exec(build, names)
    assert sum(p.numel() for p in names["model"].parameters()) > 0
