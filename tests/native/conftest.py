"""Kernels of our own as this machine has them, and as CPUs with shorter vectors do."""

import ctypes
import platform
import shutil

import pytest

from regard.native import build

OTHERS = ["-march=x86-64", "-march=haswell"]
COMPILER = next(filter(None, map(shutil.which, build.COMPILERS)), None)


@pytest.fixture(params=["this machine", *OTHERS], scope="module")
def known(request):
    if COMPILER is None:
        pytest.skip("there is no compiler")
    if request.param == "this machine":
        found = build.load_kernels()
        assert found is not None, "there is a compiler, and it does not compile them"
        return found
    if platform.machine() != "x86_64" or "avx2" not in build._processor():
        pytest.skip("made for other CPUs")
    return build.Kernels(ctypes.CDLL(str(build._compiled([COMPILER, *build.FLAGS, request.param, "-fopenmp"]))))
