"""The compiled library in the user's cache is loaded only when it is what was written there; else it is made again.

A stand-in for the compiler copies a library that is there already, so that nothing waits for a real one.
"""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from regard.native import build

pytestmark = pytest.mark.skipif(build.load_kernels() is None, reason="there is no compiler")

COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
case "$2" in *.so) echo built >> "{log}"; sleep {seconds}; cp "{library}" "$2";; *) : > "$2";; esac
"""
LOAD = "from regard.native.build import load_kernels; known = load_kernels(); print(known.rows, known.state)"


class Cache:
    """A user's cache folder, and a compiler that counts how often it is asked."""

    def __init__(self, root: Path):
        self.root, self.log, self.library = root / "cache", root / "log", root / "good.so"
        self.compiler = root / "bin" / "c++"
        self.compiler.parent.mkdir()
        compiler = next(filter(None, map(shutil.which, build.COMPILERS)))
        command = next(flags for flags in build.MACHINE if _works([compiler, *build.FLAGS, *flags]))
        shutil.copyfile(build._compiled([compiler, *build.FLAGS, *command]), self.library)
        self.wait(0)

    def wait(self, seconds: float) -> None:
        self.compiler.write_text(COMPILER.format(log=self.log, library=self.library, seconds=seconds))
        self.compiler.chmod(0o755)
        os.utime(self.compiler, (1, 1))  # a compiler of another time is another one

    @property
    def built(self) -> int:
        return self.log.read_text().count("built") if self.log.exists() else 0

    @property
    def folder(self) -> Path:
        return self.root / "regard"

    @property
    def path(self) -> Path:
        (found,) = self.folder.glob("native-*.so")
        return found

    @property
    def sum(self) -> Path:
        return self.path.with_name(self.path.name + ".sha256")

    def get(self, *flags: str) -> Path:
        return build._compiled([str(self.compiler), *build.FLAGS, *flags])

    def start(self) -> subprocess.Popen:
        """A process that loads the library."""
        there = {"XDG_CACHE_HOME": str(self.root), "PATH": f"{self.compiler.parent}:{os.environ['PATH']}"}
        return subprocess.Popen(
            [sys.executable, "-c", LOAD], env=os.environ | there, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def load(self) -> None:
        process = self.start()
        told, error = process.communicate(timeout=120)
        assert process.returncode == 0, f"{process.returncode}: {error.decode()}"
        assert told


def _works(command: list[str]) -> bool:
    try:
        return build._compiled(command).exists()
    except (OSError, subprocess.SubprocessError):
        return False


@pytest.fixture
def cache(tmp_path, monkeypatch):
    made = Cache(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(made.root))
    return made


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


def flip(path):
    """One bit, in the middle."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


DAMAGE = pytest.mark.parametrize("damage", [cut, empty, flip])


@DAMAGE
def test_a_damaged_library_is_made_again(cache, damage):
    damage(cache.get(*build.MACHINE[0]))
    assert cache.built == 1
    cache.load()  # in a process of its own, which a damaged library would end
    assert cache.built == 2
    assert cache.path.read_bytes() == cache.library.read_bytes()
    assert cache.get(*build.MACHINE[0]) == cache.path
    assert cache.built == 2


def missing(path):
    path.unlink()


def other(path):
    path.write_text("0" * 64 + "\n")


def strange(path):
    path.write_bytes(b"\xff\x00")


def link(path):
    """To the very same contents, elsewhere."""
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def someone_elses(path):
    path.chmod(0o666)


@pytest.mark.parametrize("which", ["library", "sum"])
@pytest.mark.parametrize("damage", [missing, other, strange, link, pipe, someone_elses])
def test_neither_file_is_trusted_alone(cache, damage, which):
    path = cache.get()
    assert cache.get() == path
    assert cache.built == 1
    damage(path if which == "library" else cache.sum)
    assert cache.get() == path
    assert cache.built == 2
    for one in (path, cache.sum):
        told = one.lstat()
        assert stat.S_ISREG(told.st_mode)
        assert not told.st_mode & 0o022
    assert path.read_bytes() == cache.library.read_bytes()
    assert cache.get() == path
    assert cache.built == 2


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells which file a number stands for")
def test_it_is_on_the_disk_before_it_has_its_name(cache, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda file: (done.append(Path(os.readlink(f"/proc/self/fd/{file}"))), fsync(file))
    )
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append((Path(old), Path(new))), replace(old, new)))
    path = cache.get()
    named = [step for step in done if isinstance(step, tuple)]
    assert [new for _, new in named] == [path, cache.sum]
    for old, new in named:
        at = done.index((old, new))
        assert old in done[:at]
        assert cache.folder in done[at:]


def test_two_processes_at_once(cache):
    cache.wait(2.0)
    both = [cache.start(), cache.start()]
    for one in both:
        told, error = one.communicate(timeout=120)
        assert one.returncode == 0, error.decode()
        assert told
    assert cache.built == 2
    cache.load()
    assert cache.built == 2
    assert sorted(path.name for path in cache.folder.iterdir()) == sorted([cache.path.name, cache.sum.name])


def not_a_folder(root):
    root.write_text("")


def writable_by_all(root):
    (root / "regard").mkdir(parents=True)
    (root / "regard").chmod(0o777)


@pytest.mark.parametrize("trouble", [not_a_folder, writable_by_all])
def test_a_folder_that_is_no_good_is_left_alone(cache, trouble):
    trouble(cache.root)
    path = cache.get()
    assert cache.root not in path.parents
    assert path.read_bytes() == cache.library.read_bytes()
    assert not list(cache.root.glob("regard/*"))


def test_what_is_in_the_way_is_gone_around(cache):
    path = cache.get()
    path.unlink()
    path.mkdir()
    found = cache.get()
    assert cache.root not in found.parents
    assert found.read_bytes() == cache.library.read_bytes()
