"""Who may import whom: every folder and module of regard stands in one order and imports only what stands before it,
and no imports go in a circle. And who may know parts by name, ctypes, torch's private names, or torch at all."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "regard"
ORDER = (  # those of one line may import each other, though not in a circle
    ("errors", "synonyms", "files", "schema"),  # without torch, so that the command line answers at once
    ("memory",),
    ("pattern",),
    ("native",),
    ("machine",),
    ("ops",),
    ("core",),
    ("bases",),
    ("data",),
    ("decode",),
    ("parts",),
    ("metrics",),
    ("runs",),
    ("passes",),
    ("tasks",),
    ("distill",),
    ("convert",),
    ("train",),
    ("look", "evaluate", "export", "verify", "demo"),
    ("__init__",),
    ("doctor",),
    ("cli",),
    ("__main__",),
)
FIRST = ORDER[0]
EVERY = sorted(ROOT.rglob("*.py"))


def imported(path: Path, root: Path = ROOT) -> set[str]:
    """Return the dotted names that a file imports from regard, anywhere in it, relative ones made absolute."""
    package = ("regard", *path.relative_to(root).parts[:-1])
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{whole}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "regard"}


def member(name: str, root: Path = ROOT) -> str:
    """Return the folder or module of regard that a dotted name is in; what regard itself exports is in __init__."""
    second = [*name.split("."), "__init__"][1]
    return second if (root / second).is_dir() or (root / f"{second}.py").is_file() else "__init__"


def graph(root: Path = ROOT) -> dict[str, set[str]]:
    """Return for each folder and module of regard the others that it imports from."""
    found: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        own = path.relative_to(root).parts[0].removesuffix(".py")
        found.setdefault(own, set()).update(member(name, root) for name in imported(path, root))
    return {own: others - {own} for own, others in found.items()}


def too_late(graph: dict[str, set[str]], order: tuple[tuple[str, ...], ...] = ORDER) -> list[str]:
    """Return the imports of something that stands later in the order."""
    places = {name: place for place, names in enumerate(order) for name in names}
    return [f"{own} -> {one}" for own, others in sorted(graph.items()) for one in others if places[one] > places[own]]


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return names of which each imports the one before it, the last of them being the first; none: there is no such
    circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_every_folder_has_its_place():
    assert sorted(name for names in ORDER for name in names) == sorted(graph())


def test_imports_go_one_way():
    assert too_late(graph()) == []


def test_no_imports_go_in_a_circle():
    assert circle(graph()) == []


WAYS = (
    "from ..{} import x",
    "from .. import {}",
    "import regard.{}.x",
    "from regard import {}",
    "def later():\n    from regard.{}.x import X",
    "if TYPE_CHECKING:\n    from ..{}.x import X",
)


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_import_is_seen(tmp_path, way):
    """The checks themselves, on files that break them in each way of writing an import."""
    for name in ("core", "kernels", "train"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.py").write_text("import torch\nfrom . import y\nfrom .y import Y\n")
    (tmp_path / "metrics.py").write_text("from .core import x\n")
    order = (("core", "kernels"), ("metrics",), ("train",))
    right = {"core": set(), "kernels": set(), "train": set(), "metrics": {"core"}}
    assert graph(tmp_path) == right
    assert too_late(right, order) == circle(right) == []

    (tmp_path / "core" / "x.py").write_text(way.format("train"))
    assert graph(tmp_path) == right | {"core": {"train"}}
    assert too_late(graph(tmp_path), order) == ["core -> train"]

    (tmp_path / "core" / "x.py").write_text(way.format("kernels"))
    assert too_late(graph(tmp_path), order) == circle(graph(tmp_path)) == []
    (tmp_path / "kernels" / "x.py").write_text(way.format("core"))
    assert too_late(graph(tmp_path), order) == []
    assert set(circle(graph(tmp_path))) == {"core", "kernels"}


def test_what_regard_exports_is_in_its_init(tmp_path):
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "x.py").write_text("from regard import build\nimport regard\n")
    assert graph(tmp_path) == {"cli": {"__init__"}}


def test_parts_are_found_by_their_names_in_recipes():
    """Nobody imports a part but an objective, other parts included; and only objectives among them know batches."""
    for path in EVERY:
        own, names = path.relative_to(ROOT).parts, imported(path)
        assert all(name.startswith("regard.parts.objectives.") for name in names if member(name) == "parts"), path
        if own[0] == "parts" and own[1] != "objectives":
            assert {member(name) for name in names} <= {*FIRST, "pattern", "ops", "core", "bases"}, path


def test_ctypes_and_private_names_of_torch_stay_in_native():
    private = re.compile(r"\bctypes\b|\btorch\._(?!_)|from torch\.[\w.]*\b_|torch\.\w+\._[a-zA-Z]")
    found = [path.name for path in EVERY if "native" not in path.parts and private.search(path.read_text("utf-8"))]
    assert found == []
    assert private.search((ROOT / "native" / "private.py").read_text("utf-8"))  # the check itself


def test_no_class_is_assigned():
    assert [path.name for path in EVERY if "__class__ =" in path.read_text("utf-8")] == []


def test_contracts_know_no_kernels():
    """Core and parts call ops; which code these run is for ops/dispatch.py."""
    for path in EVERY:
        if path.relative_to(ROOT).parts[0] in ("core", "parts", "pattern", "passes"):
            assert all(member(name) != "native" for name in imported(path)), path


def test_core_is_read_in_one_sitting():
    assert sum(len(path.read_text("utf-8").splitlines()) for path in (ROOT / "core").glob("*.py")) <= 2000


def test_what_comes_first_does_without_torch():
    for path in EVERY:
        if path.relative_to(ROOT).parts[0].removesuffix(".py") in FIRST:
            assert "torch" not in re.findall(r"^\s*(?:import|from) (\w+)", path.read_text("utf-8"), re.M)


def test_tests_mirror_the_tree():
    """A folder of tests is named after the folder of regard that it tests, unless it tests all of them."""
    tests, folders = ({path.parent.name for path in root.glob("*/*.py")} for root in (Path(__file__).parent, ROOT))
    assert tests - {"hostile", "laws", "parity"} == folders
