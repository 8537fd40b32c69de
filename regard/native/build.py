"""Compiles the kernels for this machine when they are first needed, which takes some seconds, and loads them. Without a
compiler, or with REGARD_NATIVE=0, torch's operations are used instead.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import warnings
from ctypes import POINTER, c_double, c_int, c_long, c_uint64, c_void_p
from pathlib import Path

import torch

from regard.files.paths import sync

from .structs import AttentionArgs, LinearParams, SearchArgs, Workspace, check_sizes

SOURCES = [Path(__file__).with_name(name) for name in ("decode.cpp", "train.cpp", "matmul.cpp")]
HEADER = Path(__file__).with_name("vector.h")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
MACHINE = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",))
COMPILE_TIMEOUT = 120  # seconds
KINDS = {torch.float32: "float32", torch.float64: "float64"}
MIN_PARALLEL_WORK = 1 << 15  # multiplications, below which one core is enough

_POINTERS, _SIZES = [c_void_p], [c_long]
ARGUMENTS = {
    "apply": [POINTER(LinearParams), *_POINTERS * 2, c_long, c_void_p, c_int],
    "attend": [POINTER(AttentionArgs)],
    "run": [*_POINTERS, c_long, *_POINTERS * 3, POINTER(Workspace), *_SIZES * 2, c_int],
    "search": [c_void_p, c_long, c_void_p, POINTER(SearchArgs), POINTER(Workspace), c_int],
    "top_k": [*_POINTERS * 8, *_SIZES * 3, c_int],
    "row": [],
    # for training
    "attention_forward": _POINTERS,
    "attention_backward": _POINTERS,
    "attention_workspace": _POINTERS,
    "activation": [*_POINTERS * 3, *_SIZES * 2, c_int, c_int],
    "activation_backward": [*_POINTERS * 3, c_long, c_int, c_int],
    "drop": [*_POINTERS * 3, c_long, c_int, c_double, c_uint64, c_int],
    "powers": [*_POINTERS * 6, *_SIZES * 2, c_int],
    # for many rows
    "pack": [*_POINTERS * 2, *_SIZES * 4, c_int],
    "multiply": _POINTERS,
    "piece": [],
}


RETURN_SIZES = ("search", "row", "attention_workspace", "piece")


class Kernels:
    """The compiled functions, by name and dtype."""

    def __init__(self, library: ctypes.CDLL):
        check_sizes(library)
        self.rows, panel, self.keep = (library.sizes(which) for which in range(3))
        self.panel = {dtype: panel // dtype.itemsize for dtype in KINDS}
        self.named = {}
        for name, takes in ARGUMENTS.items():
            for dtype, kind in KINDS.items():
                function = getattr(library, f"{name}_{kind}")
                function.argtypes, function.restype = takes, c_long if name in RETURN_SIZES else None
                self.named[name, dtype] = function
        self.state, self.piece = ({dtype: self.named[name, dtype]() for dtype in KINDS} for name in ("row", "piece"))
        self.multiplies = bool(library.prefers_own_matmul())  # whether its matmul can be faster than torch's


def load_kernels() -> Kernels | None:
    """Return the kernels; None where they are unavailable, for the reason in `why_unavailable`."""
    return _loaded()[0]


def why_unavailable() -> str:
    """Return why there are no kernels; an empty string where there are."""
    return _loaded()[1]


def find_compiler() -> str | None:
    return next(filter(None, map(shutil.which, COMPILERS)), None)


@functools.cache
def _loaded() -> tuple[Kernels | None, str]:
    if os.environ.get("REGARD_NATIVE") == "0":
        return None, "REGARD_NATIVE is 0"
    if sys.platform == "win32":
        return None, "they do not support Windows"
    compiler = find_compiler()
    if compiler is None:
        return None, f"there is no C++ compiler ({', '.join(COMPILERS)}); install one, such as g++"
    why = ""
    for flags in MACHINE:
        try:
            return Kernels(ctypes.CDLL(str(_compiled([compiler, *FLAGS, *flags])))), ""
        except subprocess.TimeoutExpired:  # with other flags it would be as slow
            why = f"it did not end within {COMPILE_TIMEOUT} seconds (REGARD_NATIVE=0 does not try)"
            break
        except (OSError, subprocess.SubprocessError, AttributeError) as error:
            why = why or _reason(error)  # try again with fewer flags
    why = f"{compiler} could not compile them: {why}"
    warnings.warn(f"regard goes on with torch's slower operations, without its own kernels: {why}", stacklevel=2)
    return None, why


def _reason(error: Exception) -> str:
    """Return the message of a compiler or loader in one line."""
    output = error.stderr if isinstance(error, subprocess.CalledProcessError) and error.stderr else str(error)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else type(error).__name__)[:300]


def _compiled(command: list[str]) -> Path:
    """Return the path of the library that a command builds, cached by sources, compiler and CPU."""
    program = Path(command[0]).resolve()
    version = f"{program} {program.stat().st_size} {program.stat().st_mtime}"
    made_of = (
        *(path.read_bytes() for path in (*SOURCES, HEADER)),
        *(text.encode() for text in (" ".join(command), version, _processor())),
    )
    name = f"native-{hashlib.sha256(b'|'.join(made_of)).hexdigest()[:20]}.so"
    for folder in filter(None, (place() for place in (_cache, _own_folder))):
        try:
            if not _intact(folder / name):
                _make(command, folder / name)
            return folder / name
        except OSError:
            continue  # it cannot be written there
    raise OSError(f"there is no folder to write {name} to")


def _make(command: list[str], path: Path) -> None:
    """Compile the library to `path`, and write its checksum beside it. Files are synced and then renamed, so that two
    processes that build the same library never see half a file."""
    with tempfile.TemporaryDirectory(dir=path.parent) as beside:
        objects = [str(Path(beside) / f"{source.stem}.o") for source in SOURCES]
        _run(*([*command, "-c", str(source), "-o", to] for source, to in zip(SOURCES, objects, strict=True)))
        library, checksum = Path(beside) / path.name, Path(beside) / "sha256"
        _run([*command, *objects, "-o", str(library)])
        checksum.write_text(hashlib.sha256(library.read_bytes()).hexdigest())
        for new, final in ((library, path), (checksum, _checksum(path))):
            new.chmod(0o700)
            sync(new)
            new.replace(final)
            sync(path.parent)


def _checksum(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _intact(path: Path) -> bool:
    """Return whether the library is there and is what was written: loading a damaged one would crash the process."""
    files = (path, _checksum(path))
    if not all(os.path.lexists(file) and _is_own(file.lstat(), stat.S_IFREG) for file in files):
        return False
    return hashlib.sha256(path.read_bytes()).hexdigest().encode() == _checksum(path).read_bytes()


def _is_own(found: os.stat_result, kind: int) -> bool:
    """Return whether it is a file (or folder) that only this user can write to."""
    others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_IFMT(found.st_mode) == kind and found.st_uid == os.getuid() and not others


def _run(*commands: list[str]) -> None:
    """Run the commands in parallel without output; raise if one fails."""
    no, kept = subprocess.DEVNULL, subprocess.PIPE
    running = [
        subprocess.Popen(command, stdin=no, stdout=no, stderr=kept, text=True, errors="replace", process_group=0)
        for command in commands
    ]
    try:
        for one, command in zip(running, commands, strict=True):
            _, errors = one.communicate(timeout=COMPILE_TIMEOUT)
            if one.returncode:
                raise subprocess.CalledProcessError(one.returncode, command, stderr=errors)
    finally:
        for one in running:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)  # with the programs that it has started
            one.wait()


def _cache() -> Path | None:
    """Return the cache folder for compiled kernels; None unless only this user can write to it, since its code is
    run."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard"
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        return home if os.access(home, os.W_OK) and _is_own(home.stat(), stat.S_IFDIR) else None
    except OSError:
        return None


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="regard-")  # as long as this process lives


def _own_folder() -> Path:
    return Path(_temporary().name)


def _processor() -> str:
    """Return a description of the CPU that differs between instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return " ".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def threads_for(work: int) -> int:
    """Return the number of threads for so many multiplications."""
    return 1 if work < MIN_PARALLEL_WORK else torch.get_num_threads()
