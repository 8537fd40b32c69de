"""`regard doctor`: what it says of a machine with kernels, and of one without."""

import json
import os
import subprocess
import sys

import torch

from regard.cli import main
from regard.native.build import load_kernels


def test_facts_as_json(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["machine", "software", "kernels", "advice"]
    assert found["software"]["torch"] == torch.__version__
    assert found["kernels"]["compiled"] == (load_kernels() is not None)
    assert 1 <= found["machine"]["cores"] <= os.cpu_count()


def test_facts_as_text(capsys, monkeypatch):
    monkeypatch.setattr("regard.doctor._cores", lambda: 1)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == ["machine", "software", "kernels", "advice"]
    assert "  cores             1" in lines


def test_a_machine_without_a_compiler_is_told_to_install_one(tmp_path):
    env = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "regard", "doctor"], env=env, capture_output=True, text=True)
    assert done.returncode == 0
    assert "  compiled          no" in done.stdout
    assert "slower than they could be: there is no C++ compiler (c++, g++, clang++); install one" in done.stdout
