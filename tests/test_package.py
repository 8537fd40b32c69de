"""The wheel: it holds all that regard needs, and works from another folder, where nothing of this checkout is."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = """
import pathlib, regard, torch
from regard.native.build import load_kernels, why_unavailable
assert pathlib.Path(regard.__file__).is_relative_to({place!r}), regard.__file__
assert load_kernels() or "compiler" in why_unavailable()
model = regard.build("gpt2", size="tiny", vocab=61).eval()
print(tuple(model(torch.zeros(1, 3, dtype=torch.long)).shape))
"""

PARITY = """
import json, os, pathlib, sys
from regard import UserError
from regard.verify import golden, report

def told(folder, variable):
    os.environ.pop("REGARD_GOLDEN", None)
    if variable is not None:
        os.environ["REGARD_GOLDEN"] = variable
    try:
        with golden.use_folder(None if folder is None else pathlib.Path(folder)):
            section = report.parity("attn_dot")
            return section.note or " ".join(f"{finding.law} {finding.holds}" for finding in section.findings)
    except UserError as error:
        return str(error)

print(json.dumps([told(*given) for given in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from the tracked files, as for a release."""
    out, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    tracked = subprocess.check_output(
        ["git", "ls-files", "regard", "pyproject.toml", "README.md", "LICENSE"], cwd=ROOT, text=True
    )
    for name in tracked.splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(out), str(source)], check=True)
    (found,) = out.glob("*.whl")
    return found


def test_it_holds_everything(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.check_output(["git", "ls-files", "regard"], cwd=ROOT, text=True).splitlines()
    wanted = {name for name in tracked if Path(name).suffix in (".py", ".toml", ".json", ".cpp", ".h")}
    assert wanted - held == set()
    assert not any(name.startswith(("tests", "bench")) for name in held)


def test_it_works_from_another_folder(wheel, tmp_path, hasty):
    place = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--target", str(place), str(wheel)], check=True)
    env = {"PYTHONPATH": str(place), "PATH": f"{hasty}:/usr/bin:/bin", "HOME": str(tmp_path)}
    ran = [sys.executable, "-c", CODE.format(place=str(place))]
    assert (
        subprocess.run(ran, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout == "(1, 3, 61)\n"
    )
    listed = subprocess.run([sys.executable, "-m", "regard", "systems"], cwd=tmp_path, env=env, capture_output=True)
    assert listed.returncode == 0
    assert b"gpt2" in listed.stdout


def test_it_says_where_golden_files_are_looked_for(wheel, tmp_path):
    place, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--target", str(place), str(wheel)], check=True)
    (place / "tests" / "golden").mkdir(parents=True)  # of another package, which is none of ours
    elsewhere.mkdir()
    env = {"PYTHONPATH": str(place), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "REGARD_NATIVE": "0"}
    goldens = str(ROOT / "tests" / "golden")
    asked = [
        (None, None),
        (None, str(tmp_path)),
        (None, "nowhere"),
        ("nowhere", None),
        (goldens, None),
        (None, goldens),
    ]
    ask = [sys.executable, "-c", PARITY, json.dumps(asked)]
    done = subprocess.run(ask, cwd=elsewhere, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    neither, empty, no_variable, no_flag, by_flag, by_variable = json.loads(done.stdout)
    assert neither == (
        "not compared: golden files are not installed with regard; give --golden FOLDER or set REGARD_GOLDEN, for "
        "example to tests/golden of a checkout of regard"
    )
    assert "no golden file: there is no attn_dot-*.safetensors in " in empty
    assert "REGARD_GOLDEN: there is no folder 'nowhere'" in no_variable
    assert "--golden: there is no folder 'nowhere'" in no_flag
    assert by_flag == by_variable == "attn_dot-a True"
