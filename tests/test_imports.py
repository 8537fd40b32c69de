"""Who may import whom: errors and files nobody, native those, then ops, core, bases and parts, each what stands before
it; the tools never a part. And who may know ctypes, torch's private names, or torch at all."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "regard"
TOOLS = ("train", "decode", "serve", "look", "compare", "data", "verify", "convert")
FIRST = {"errors", "synonyms", "files", "schema"}  # without torch, so that the command line answers at once
ALLOWED = {
    "files": FIRST,
    "pattern": {*FIRST, "pattern"},
    "native": {*FIRST, "native"},
    "ops": {*FIRST, "native", "ops"},
    "core": {*FIRST, "memory", "pattern", "ops", "core"},
    "bases": {*FIRST, "pattern", "native", "ops", "core", "bases"},
    "parts": {*FIRST, "pattern", "ops", "core", "bases"},
    "passes": {*FIRST, "ops", "core"},
}
FILES = sorted(path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] in {*ALLOWED, *TOOLS})


def imported(path: Path) -> set[str]:
    """Dotted names that a file imports, anywhere in it, relative ones made absolute."""
    package = ("regard", *path.relative_to(ROOT).parts[:-1])
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{whole}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "regard"}


def siblings(path: Path) -> set[str]:
    """The folders of regard that it imports from; regard itself counts as all of them."""
    return {[*name.split("."), "."][1] for name in imported(path)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports(path):
    own = path.relative_to(ROOT).parts[0]
    if own in ALLOWED:
        assert siblings(path) <= ALLOWED[own]
    else:
        assert "parts" not in siblings(path)


def test_a_wrong_import_is_seen(tmp_path, monkeypatch):
    """The check itself, on files that break it in each way of writing an import."""
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "core").mkdir()
    for text in (
        "from ..bases import attend",
        "from .. import bases",
        "import regard.bases.attend",
        "from regard import bases",
        "def later():\n    from regard.bases.attend import Attend",
    ):
        path = tmp_path / "core" / "mixer.py"
        path.write_text(text)
        assert siblings(path) == {"bases"}, text
    path.write_text("import torch\nfrom .context import Context\nfrom . import norm")
    assert siblings(path) == {"core"}


EVERY = sorted(ROOT.rglob("*.py"))


def test_ctypes_and_private_names_of_torch_stay_in_native():
    private = re.compile(r"\bctypes\b|\btorch\._(?!_)|from torch\.[\w.]*\b_|torch\.\w+\._[a-zA-Z]")
    found = [path.name for path in EVERY if "native" not in path.parts and private.search(path.read_text("utf-8"))]
    assert found == []
    assert private.search((ROOT / "native" / "private.py").read_text("utf-8"))  # the check itself


def test_no_class_is_assigned():
    assert [path.name for path in EVERY if "__class__ =" in path.read_text("utf-8")] == []


def test_core_is_read_in_one_sitting():
    assert sum(len(path.read_text("utf-8").splitlines()) for path in (ROOT / "core").glob("*.py")) <= 2100


def test_what_comes_first_does_without_torch():
    for path in EVERY:
        if path.relative_to(ROOT).parts[0].removesuffix(".py") in FIRST:
            assert "torch" not in re.findall(r"^\s*(?:import|from) (\w+)", path.read_text("utf-8"), re.M)
