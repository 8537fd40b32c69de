"""docs/architecture.md is true: its paths exist, its picture shows the imports of today, a training and a prediction
enter the files of its walks in that order, and a forward pass enters at most five files besides the parts, what these
are made of (bases, patterns), and the functions of tensors that they call (ops, native)."""

import re
import runpy
import sys
import threading
from contextlib import contextmanager, nullcontext
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import regard
from regard.cli import main
from regard.ops.dispatch import disabled
from tests.test_imports import EVERY, ROOT, graph

HERE = ROOT.parent
PAGE = (HERE / "docs" / "architecture.md").read_text(encoding="utf-8")
DRAWING = runpy.run_path(str(HERE / "docs" / "draw_architecture.py"))
WORDS = ["mixer", "pattern", "position", "wiring", "tap", "recipe", "part", "law"]
RECIPES = ("gpt2", "llama", "bert", "transformer", "retnet", "local")
COLUMNS = (("core",), ("bases", "pattern"), ("ops",))  # of the table of files that a forward pass enters
OPEN = {"parts", "bases", "pattern"}  # what a recipe names, and what that is made of
LEAVES = {"ops", "native"}  # tensors in, tensors out


@contextmanager
def entered():
    """Collect the files of regard whose functions are called inside, again each time that another one was between."""
    files: list[str] = []
    names = {str(path): path.relative_to(HERE).as_posix() for path in EVERY}

    def called(frame, event, argument):
        name = names.get(frame.f_code.co_filename) if event == "call" else None
        if name and files[-1:] != [name]:
            files.append(name)

    before = sys.getprofile()
    threading.setprofile(called)
    sys.setprofile(called)
    try:
        yield files
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def section(title: str) -> str:
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]


def walks(title: str) -> list[list[str]]:
    """Return the files that begin the points of each numbered list of a section."""
    lists: list[list[str]] = []
    for number, file in re.findall(r"^(\d+)\. `([^`]+)`", section(title), re.MULTILINE):
        if number == "1":
            lists.append([])
        lists[-1].append(file)
    return lists


def astray(walk: list[list[str]], files: list[str]) -> str:
    """Return what is wrong with a walk, whose lists follow each other: each begins where its first file is entered
    after the list before, and names files in the order in which they are first entered from there on."""
    at = 0
    for points in walk:
        if points[0] not in files[at:]:
            return f"{points[0]} is not entered any more"
        begin = at = files.index(points[0], at)
        for one, other in pairwise(points):
            if other not in files[begin:]:
                return f"{other} is not entered after {one}"
            first = files.index(other, begin)
            if first <= at:
                return f"{other} is entered before {one}"
            at = first
    return ""


def test_every_path_on_the_page_exists():
    paths = re.findall(r"\b(?:regard|tests|docs|bench)/[\w./-]*\b", PAGE) + re.findall(r"\]\(([^)#:]+)\)", PAGE)
    assert len(paths) > 50
    for path in paths:
        assert (HERE / path).exists() or (HERE / "docs" / path).exists(), path


def test_the_picture_shows_the_imports():
    """Mend it by `python -m docs.draw_architecture`."""
    svg = DRAWING["FILE"].read_text(encoding="utf-8")
    imports = graph()
    folders = sorted(name for name in imports if (ROOT / name).is_dir())
    assert sorted(re.findall(r'font-weight="bold">(\w+)<', svg)) == folders
    links = DRAWING["arrows"](imports, folders)
    assert re.findall(r'<path id="(\w+)-(\w+)"', svg) == links
    assert all(other in imports[own] for own, other in links)


def test_an_arrow_that_others_imply_is_left_out():
    """The drawing itself, on a small tree: a module between two folders counts, and is not drawn."""
    imports = {"a": {"b", "c", "m"}, "b": {"c"}, "c": set(), "m": {"d"}, "d": set()}
    links = DRAWING["arrows"](imports, ["a", "b", "c", "d"])
    assert links == [("a", "b"), ("a", "d"), ("b", "c")]
    assert DRAWING["rows_of"]("abcd", links) == {"a": 0, "b": 1, "c": 2, "d": 1}


def test_the_eight_words_are_explained():
    assert re.findall(r"^\| \*(\w+)\* \|", PAGE, re.MULTILINE) == WORDS


def test_a_walk_astray_is_seen():
    """The check itself."""
    files = ["a", "b", "a", "c", "a", "d", "b", "c"]
    assert astray([["a", "b", "c", "d"], ["b", "c"]], files) == ""
    assert astray([["a", "c", "b"]], files) == "b is entered before c"
    assert astray([["a", "e"]], files) == "e is not entered after a"
    assert astray([["a", "d"], ["d", "c"]], files) == ""
    assert astray([["a", "d"], ["c", "b"]], files) == "b is not entered after c"
    assert astray([["b", "d"], ["e"]], files) == "e is not entered any more"


def test_the_walks_are_walked(tmp_path, monkeypatch, pairs, capsys):
    """The two commands of the page, on a tiny model and a single step, so that no second round hides a wrong order."""
    for path in EVERY:  # an import calls functions, too, and none is to happen on the way
        name = path.relative_to(HERE).with_suffix("").parts
        if name[1] in ("cli", "parts", "tasks", "train") and name[-1] != "__main__":
            import_module(".".join(name).removesuffix(".__init__"))
    monkeypatch.chdir(tmp_path)
    small = ["--steps", "1", "--set", "model.width=16", "--set", "model.heads=2", "--vocab", "60"]
    with entered() as files:
        assert main(["train", "--data", str(pairs), "--out", "run", *small]) == 0
    assert Path("run/checkpoints/step-00000001/model.safetensors").exists()
    assert astray(walks("From pairs.tsv to the checkpoint"), files) == ""

    Path("sentences.txt").write_text("abc\nde\n")
    with entered() as files:
        assert main(["predict", "run", "sentences.txt"]) == 0
    assert capsys.readouterr().out
    assert astray(walks("From a sentence to its answer"), files) == ""


def forward(name: str, kernels: bool, training: bool) -> list[str]:
    """Return the files that a forward pass enters, each once. It is the second pass: in the first one of a process, a
    pattern asks schema.py for its name."""
    model = regard.build(name, size="tiny", vocab=50).train(training)
    inputs = {"tokens": torch.randint(50, (2, 13))}
    if model.kind == "encoder-decoder":
        inputs["source"] = torch.randint(50, (2, 11))
    with torch.set_grad_enabled(training), nullcontext() if kernels else disabled():
        model(**inputs)
        with entered() as files:
            model(**inputs)
    return list(dict.fromkeys(files))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_a_forward_pass_is_followed_through_five_files(name, kernels, training):
    files = [file for file in forward(name, kernels, training) if file.split("/")[1] not in OPEN | LEAVES]
    assert len(files) <= 5, files
    assert all(file.startswith("regard/core/") for file in files), files


def test_the_page_lists_what_a_forward_pass_enters():
    """All files but the parts, in plain PyTorch, so that every machine has the same."""
    rows = []
    for name in RECIPES:
        files = forward(name, kernels=False, training=False)
        cells = [" ".join(Path(file).stem for file in files if file.split("/")[1] in one) for one in COLUMNS]
        rows.append(f"| `{name}` | {' | '.join(cells)} |".replace("|  |", "| – |"))
    told = re.findall(r"^\| `.*", section("A forward pass"), re.MULTILINE)
    assert told == rows, "\n".join(["the table should be", *rows])
