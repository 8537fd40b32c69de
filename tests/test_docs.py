"""docs/adding-a-part.md and docs/verifying.md, done exactly as they say: their files written, their commands run in
order, their output seen."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {  # a page, one of its commands, and how many it has
    "adding-a-part.md": ("regard verify ./my.toml --parts ./my_parts", 6),
    "verifying.md": ("regard verify ./mine.toml --golden my_golden", 2),
}
BLOCK = re.compile(
    r"(?:^\*\*`(?P<file>[^`]+)`\*\*\n\n)?^```(?P<kind>\w+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]\d+)?")


def commands(body: str) -> list[tuple[str, list[str]]]:
    """Each line after a '$ ', and what is shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in body.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def without_numbers(lines: list[str]) -> list[str]:
    """What a page and a run have in common: numbers differ between machines, and a law's remark may hold some."""
    said = [NUMBER.sub("#", line) for line in lines]
    return [line.split("#")[0].rstrip() if line.lstrip().startswith(("✓", "✗")) else line.rstrip() for line in said]


@pytest.mark.parametrize("page", PAGES)
def test_the_page_does_what_it_says(page, tmp_path):
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": tools, "COLUMNS": "100", "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}
    done = []
    for block in BLOCK.finditer((DOCS / page).read_text(encoding="utf-8")):
        if block["kind"] != "console":
            assert block["file"], f"a block without a file name: {block['body'][:60]!r}"
            path = tmp_path / block["file"]
            path.parent.mkdir(exist_ok=True)
            path.write_text(block["body"], encoding="utf-8")
            continue
        for command, shown in commands(block["body"]):
            ran = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
            assert ran.stderr == "", command
            assert without_numbers(ran.stdout.splitlines()) == without_numbers(shown), command
            done.append(command)
    known, count = PAGES[page]
    assert any(command.startswith(known) for command in done)
    assert len(done) == count
