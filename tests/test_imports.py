"""Who may import whom: core no sibling, kernels core, parts both, passes core, and the tools never a part."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "regard"
TOOLS = ("train", "decode", "serve", "look", "compare", "data", "verify", "convert")
ALLOWED = {"core": {"core"}, "kernels": {"core", "kernels"}, "parts": {"core", "kernels"}, "passes": {"core"}}
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
        "from ..kernels import attend",
        "from .. import kernels",
        "import regard.kernels.attend",
        "from regard import kernels",
        "def later():\n    from regard.kernels.attend import Attend",
    ):
        path = tmp_path / "core" / "mixer.py"
        path.write_text(text)
        assert siblings(path) == {"kernels"}, text
    path.write_text("import torch\nfrom .context import Context\nfrom . import norm")
    assert siblings(path) == {"core"}
