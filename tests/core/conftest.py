"""Kernels of our own as this machine has them, and as others do: with shorter vectors, or with tiles."""

import ctypes
import functools
import platform
import shutil

import pytest
import torch

from regard.core import native

COMPILER = next(filter(None, map(shutil.which, native.COMPILERS)), None)


@pytest.fixture(scope="session")
def compiled():
    """Kernels for a processor, as a compiler's flags tell it."""

    @functools.cache
    def make(flags):
        if COMPILER is None:
            pytest.skip("there is no compiler")
        if flags == "this machine":
            found = native.kernels()
            assert found is not None, "there is a compiler, and it does not compile them"
            return found
        if platform.machine() != "x86_64" or "avx2" not in native._processor():
            pytest.skip("made for other processors")
        command = [COMPILER, *native.FLAGS, *flags.split(), "-fopenmp"]
        return native.Kernels(ctypes.CDLL(str(native._compiled(command))))

    return make


@pytest.fixture(params=["this machine", "-march=x86-64", "-march=haswell"], scope="module")
def known(request, compiled):
    return compiled(request.param)


@pytest.fixture(params=[1, 2])
def threads(request, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(native, "SMALL", 1)  # all work is for all cores
    yield request.param
    torch.set_num_threads(before)
