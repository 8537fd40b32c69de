import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # those who wait for others leave the cores to them

import ctypes
import gc
import platform
import random
import shutil

import pytest
import torch

from regard.machine import tune
from regard.native import build
from regard.runs.job import Job
from tests.pairwise import thin

tune()  # as the command line does; test_guest.py tests what is without
torch.set_num_threads(1)  # two workers share two cores

TINY = ["model.width=8", "model.depth=1", "model.heads=2", "model.tie=target", "model.dropout=0.2"]
TINY += [f"model.{side}.layer.0.feedforward.hidden=12" for side in ("encoder", "decoder")]

OTHERS = ["-march=x86-64", "-march=haswell"]
COMPILER = next(filter(None, map(shutil.which, build.COMPILERS)), None)


def pytest_configure(config):
    config.addinivalue_line("markers", "pairwise: of all cases, as many as let every two values of two parameters meet")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    items[:], dropped = thin(items)
    config.hook.pytest_deselected(items=dropped)


def pytest_collection_finish(session):
    """What is imported and collected stays, so the garbage collector need not walk through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded():
    """What a test draws is the same every time."""
    torch.manual_seed(1)


@pytest.fixture(params=[1, 2])
def threads(request, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(build, "MIN_PARALLEL_WORK", 1)  # all work is for all cores
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=["this machine", *OTHERS], scope="module")
def known(request):
    """Kernels of our own as this machine has them, and as CPUs with shorter vectors do."""
    if COMPILER is None:
        pytest.skip("there is no compiler")
    if request.param == "this machine":
        found = build.load_kernels()
        assert found is not None, "there is a compiler, and it does not compile them"
        return found
    if platform.machine() != "x86_64" or "avx2" not in build._processor():
        pytest.skip("made for other CPUs")
    return build.Kernels(ctypes.CDLL(str(build._compiled([COMPILER, *build.FLAGS, request.param, "-fopenmp"]))))


@pytest.fixture
def hasty(tmp_path):
    """A folder for PATH in which the compiler optimises nothing, and so takes a fifth of the time."""
    compiler = tmp_path / "hasty" / "c++"
    compiler.parent.mkdir()
    if COMPILER is not None:
        compiler.write_text(f'#!/bin/sh\nexec {COMPILER} "$@" -O0\n')
        compiler.chmod(0o755)
    return compiler.parent


@pytest.fixture
def pairs(tmp_path):
    """A file of words of seven letters at most, each with its spelling in capitals: something tiny to learn."""
    rng = random.Random(0)
    words = sorted({"".join(rng.choices("abcdefg", k=rng.randint(1, 7))) for _ in range(130)})
    path = tmp_path / "words.tsv"
    path.write_text("source\ttarget\n" + "".join(f"{w}\t{' '.join(w.upper())}\n" for w in words))
    return path


@pytest.fixture
def job(pairs, tmp_path):
    """A job over these pairs; settings of [train] by name."""

    def make(run="run", job=None, **train):
        settings = {"steps": 12, "batch_tokens": 80, "warmup": 1, "lr": 0.01, **train}
        overrides = [*TINY, *(f"train.{key}={value}" for key, value in settings.items())]
        given = {"data": str(pairs), "dev": "0.2", "test": "0", "tokenizer": "characters,pretokenised"}
        given |= {"recipe": "transformer", "size": "tiny", "overrides": overrides, "run": str(tmp_path / run)}
        return Job(**(given | (job or {})), as_published=True)

    return make
