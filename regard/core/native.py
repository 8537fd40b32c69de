"""Kernels in machine code: native.cpp for decoding, learn.cpp for learning, multiply.cpp for products
of many rows, compiled once for this machine by the compiler that is there, in some seconds, when first wanted. Where
there is none, or REGARD_NATIVE is 0, torch's operations do the same. Here is how they are made, and those for decoding;
the others are in learn.py and multiply.py.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, Structure, addressof, c_double, c_int, c_int64, c_long, c_uint64, c_void_p
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .paths import sync

SOURCES = [Path(__file__).with_name(name) for name in ("native.cpp", "learn.cpp", "multiply.cpp")]
HEADER = Path(__file__).with_name("native.h")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
MACHINE = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",))
SECONDS = 120  # that a compiler may take
KINDS = {torch.float32: "float32", torch.float64: "float64"}
SMALL = 1 << 15  # multiplications, up to which one core is enough


class Map(Structure):
    """As native.cpp has it. A module may keep one; a copy of it knows nothing, and is made anew."""

    _fields_ = [(name, c_void_p) for name in ("weight", "bias", "packed", "scale", "sums")] + [
        ("wide", c_int64),
        ("out", c_int64),
    ]
    held: tuple[Tensor | None, ...] = (None,)  # what it points at

    def __reduce__(self) -> tuple:
        return Map, ()


class Looks(Structure):
    """As native.cpp has it."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "added", "held", "y", "room")),
        *((name, c_int64) for name in ("batch", "heads", "groups", "queries", "keys", "dim", "value_dim", "hides")),
        *((name, c_int64) for name in ("held_step", "threads")),
        *((name, c_int64 * 3) for name in ("q_step", "k_step", "v_step")),
        ("added_step", c_int64 * 4),
        ("scale", c_double),
    )


class Gauge(Structure):
    """As native.cpp has it."""

    _fields_ = (*((name, c_void_p) for name in ("weight", "bias")), ("eps", c_double), ("centres", c_int64))


class Branch(Structure):
    """As native.cpp has it.

    maps:   linear ones that it points at; beside: what else.
    wants:  the numbers that it needs room for: of queries or of what is bent, of what queries find, of scores; channels
            of its widest input.
    work:   multiplications for a row, about.
    leaves: channels of what comes out.
    of:     what whoever made it wants to know again.
    slots, looked, size: of attention: where keys and values begin and how far it is to the next ones; batch, heads and
            queries; bytes of a number.
    """

    _fields_ = (
        ("looks", Looks),
        *((name, c_void_p) for name in ("before", "after", "first", "key", "value", "last", "cos", "sin")),
        *((name, c_void_p) for name in ("key_slot", "value_slot")),
        *((name, c_int64) for name in ("attends", "how", "adds", "pairs", "pairs_step", "halves")),
    )
    maps: Sequence[Map | None]
    beside: tuple
    of: tuple
    wants: list[int]
    work: int
    leaves: int
    slots: tuple[int, int, int, int]
    looked: tuple[int, int, int]
    size: int


class Room(Structure):
    """As native.cpp has it."""

    _fields_ = [(name, c_void_p) for name in ("normed", "found", "middle", "other", "scores", "maps")]


_POINTERS, _SIZES = [c_void_p], [c_long]
TAKES = {
    "apply": [POINTER(Map), *_POINTERS * 2, c_long, c_void_p, c_int],
    "attend": [POINTER(Looks)],
    "run": [*_POINTERS, c_long, *_POINTERS * 3, POINTER(Room), *_SIZES * 2, c_int],
    "likeliest": [*_POINTERS * 8, *_SIZES * 3, c_int],
    "row": [],
    # for learning
    "see": _POINTERS,
    "unsee": _POINTERS,
    "room": _POINTERS,
    "bend": [*_POINTERS * 3, *_SIZES * 2, c_int, c_int],
    "unbend": [*_POINTERS * 3, c_long, c_int, c_int],
    "drop": [*_POINTERS * 3, c_long, c_int, c_double, c_uint64, c_int],
    "powers": [*_POINTERS * 6, *_SIZES * 2, c_int],
    # for many rows
    "pack": [*_POINTERS * 2, *_SIZES * 4, c_int],
    "multiply": _POINTERS,
    "piece": [],
}


class Kernels:
    """The compiled functions, by name and by kind of number."""

    def __init__(self, library: ctypes.CDLL):
        if library.untold():  # which torch's library for half precision would use nevertheless, and die of it
            os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
        self.rows, panel, self.keep = (library.sizes(which) for which in range(3))
        self.panel = {dtype: panel // dtype.itemsize for dtype in KINDS}
        self.named = {}
        for name, takes in TAKES.items():
            for dtype, kind in KINDS.items():
                function = getattr(library, f"{name}_{kind}")
                function.argtypes, function.restype = takes, c_long if name in ("row", "room", "piece") else None
                self.named[name, dtype] = function
        self.state, self.piece = ({dtype: self.named[name, dtype]() for dtype in KINDS} for name in ("row", "piece"))
        self.multiplies = bool(library.multiplies())  # better than torch


_watched = torch._C._len_torch_dispatch_stack


@functools.cache
def kernels() -> Kernels | None:
    """None where they cannot be had."""
    if os.environ.get("REGARD_NATIVE") == "0" or sys.platform == "win32":
        return None
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return None
    for flags in MACHINE:
        try:
            return Kernels(ctypes.CDLL(str(_compiled([compiler, *FLAGS, *flags]))))
        except (OSError, subprocess.SubprocessError, AttributeError):
            continue  # with less
    return None


def _compiled(command: list[str]) -> Path:
    """The library that a command makes, as long as source, compiler and CPU are these."""
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
    """Compile the library and put it at `path`, its checksum after it. Each file is on the disk before it gets its
    name, so whoever builds the same library meanwhile replaces a whole file with a whole file."""
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
    """Return whether the library is there and is what was written: to load a damaged one would end the process."""
    files = (path, _checksum(path))
    if not all(os.path.lexists(file) and _is_own(file.lstat(), stat.S_IFREG) for file in files):
        return False
    return hashlib.sha256(path.read_bytes()).hexdigest().encode() == _checksum(path).read_bytes()


def _is_own(found: os.stat_result, kind: int) -> bool:
    """Return whether it is a file (or folder) that nobody but this user can write to."""
    others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_IFMT(found.st_mode) == kind and found.st_uid == os.getuid() and not others


def _run(*commands: list[str]) -> None:
    """All at once, and quietly."""
    no = subprocess.DEVNULL
    running = [subprocess.Popen(command, stdin=no, stdout=no, stderr=no) for command in commands]
    try:
        for one, command in zip(running, commands, strict=True):
            if one.wait(SECONDS):
                raise subprocess.CalledProcessError(one.returncode, command)
    finally:
        for one in running:
            one.kill()
            one.wait()


def _cache() -> Path | None:
    """Where compiled kernels stay, if it is this user's alone: what lies there is run."""
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
    """What tells CPUs apart that do not know the same instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return " ".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def native(first: Tensor, *others: Tensor | None) -> Kernels | None:
    """The kernels, if they can take such tensors: numbers of one kind on a CPU, nothing to learn, and nobody who
    watches or records single operations."""
    if torch.is_grad_enabled():
        if first.requires_grad:
            return None
        for other in others:
            if other is not None and other.requires_grad:
                return None
    return able(first, *others)


class _Switch(threading.local):
    off = False


_switch = _Switch()


@contextmanager
def disabled() -> Iterator[None]:
    """Inside, in this thread, torch's operations do everything."""
    before, _switch.off = _switch.off, True
    try:
        yield
    finally:
        _switch.off = before


def able(first: Tensor, *others: Tensor | None) -> Kernels | None:
    """The same, whether they learn or not."""
    dtype = first.dtype
    if dtype not in KINDS or not first.is_cpu or _switch.off:
        return None
    for other in others:
        if other is not None and other.dtype != dtype:
            return None
    if _watched() or torch._C._get_tracing_state() is not None or torch.is_autocast_enabled("cpu"):
        return None
    return None if torch.compiler.is_compiling() else kernels()


def threads(work: int) -> int:
    """Cores for so many multiplications."""
    return 1 if work < SMALL else torch.get_num_threads()


def map_of(
    weight: Tensor,
    bias: Tensor | None,
    packed: Tensor | None = None,
    scale: Tensor | None = None,
    sums: Tensor | None = None,
) -> Map:
    """Of weights (out, in), contiguous; for many rows as `pack` has them, too; where they are of eight bits, with the
    scale and the sum of each output."""
    out, wide = weight.shape
    bias = None if bias is None else bias.contiguous()
    tensors = (weight, bias, packed, scale, sums)
    made = Map(*[None if t is None else t.data_ptr() for t in tensors], wide, out)
    made.held = tensors
    return made


def room(known: Kernels, x: Tensor, wide: int) -> Tensor:
    """For what products need besides, of rows x of up to `wide` channels."""
    return torch.empty((x.shape[0] + known.rows) * (wide + 1) * x.element_size(), dtype=torch.uint8)


def apply(known: Kernels, map: Map, x: Tensor) -> Tensor:
    """x (rows, in), contiguous -> (rows, out)"""
    y = x.new_empty(x.shape[0], map.out)
    beside = room(known, x, map.wide) if map.scale or map.packed else None
    known.named["apply", x.dtype](
        map, x.data_ptr(), y.data_ptr(), x.shape[0], None if beside is None else beside.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return y


BENDS = ("identity", "relu", "gelu", "gelu_tanh", "silu")  # as native.cpp counts them


def attend(known: Kernels, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, held: Tensor | None = None) -> Tensor:
    """q (batch, heads, n, dim), k and v (rows, kv_heads, m, dim), channels side by side; added: to scores, or bool,
    which of them count, broadcast to (batch, heads, n, m); held (batch, m or more): the row of each key, None: the own
    -> (batch, n, heads, dim)"""
    batch, heads, queries, dim = q.shape
    _, groups, keys, wide = v.shape
    cores = threads(q.numel() * keys)
    y, scores = q.new_empty(batch, queries, heads, wide), q.new_empty(_scores(heads, keys, cores, q.element_size()))
    steps: Sequence[int] = (0, 0, 0, 0)
    if added is not None:
        added = added.expand(batch, heads, queries, keys)
        steps = added.stride()
    known.named["attend", q.dtype](
        Looks(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), None if added is None else added.data_ptr(),
            None if held is None else held.data_ptr(), y.data_ptr(), scores.data_ptr(), batch, heads, groups, queries,
            keys, dim, wide, added is not None and added.dtype == torch.bool, 0 if held is None else held.stride(0),
            cores, q.stride()[:3], k.stride()[:3], v.stride()[:3], steps, 1.0,
        )
    )  # fmt: skip
    return y


def _scores(heads: int, keys: int, cores: int, size: int) -> int:
    """Numbers of so many bytes that attention needs room for."""
    return cores * heads * (keys + 64 // size)


def feeding(into: Map, out: Map, bend: str, rows: int, gated: Map | None = None) -> Branch:
    """A map, a bend and a map; with what the bent ones are the gate of."""
    made = Branch(first=addressof(into), last=addressof(out), how=BENDS.index(bend))
    if gated is not None:
        made.key = addressof(gated)
    made.maps, made.work, made.leaves = (into, out, gated), into.wide * into.out, out.out
    made.wants = [rows * into.out, rows * into.out if gated else 0, 0, max(into.wide, into.out)]
    return made


class Spin(NamedTuple):
    """How pairs of channels are turned; halves: each with the one half the channels behind it, else with its
    neighbour."""

    cos: Tensor  # (rows or 1, pairs)
    sin: Tensor
    halves: bool


def looking(
    maps: Sequence[Map | None], rows: int, k: Tensor, v: Tensor, slot: int, scale: float, added: Tensor | None,
    held: Tensor | None, keys: int, queries: int = 1, spin: Spin | None = None,
) -> Branch:  # fmt: skip
    """Attention at the next position of each row: maps to queries, keys, values, and back. The first `keys` of k and v
    (stored, m, kv_heads, dim) are looked at, once keys and values are in their `slot`; without maps to these, as they
    are, by `queries` rows each."""
    first, key, value, last = maps
    assert first is not None
    assert last is not None
    (row, place, head, _), (v_row, v_place, v_head, _) = k.stride(), v.stride()
    (groups, dim), out, wide, size = k.shape[2:], first.out, v.shape[3], k.element_size()
    looks = Looks(
        k=k.data_ptr(), v=v.data_ptr(), batch=rows // queries, heads=out // dim, groups=groups, queries=queries,
        dim=dim, value_dim=wide, q_step=(queries * out, dim, out), k_step=(row, head, place),
        v_step=(v_row, v_head, v_place), scale=scale,
    )  # fmt: skip
    made = Branch(looks, first=addressof(first), last=addressof(last), attends=1)
    if key is not None and value is not None:
        made.key, made.value = addressof(key), addressof(value)
    made.maps, made.work, made.leaves = maps, first.wide * out, last.out
    made.slots = (looks.k, looks.v, place * size, v_place * size)
    made.wants = [rows * out, rows * last.wide, 0, max(first.wide, last.wide)]
    made.size, made.looked = size, (rows // queries, out // dim, queries)
    relook(made, slot, added, held, keys, spin)
    return made


def relook(
    made: Branch, slot: int, added: Tensor | None, held: Tensor | None, keys: int, spin: Spin | None = None
) -> None:
    """What `looking` made, for another position of the same rows: their cache lies where it lay."""
    looks, (batch, heads, queries) = made.looks, made.looked
    k, v, step, v_step = made.slots
    if added is not None:
        added = added.expand(batch, heads, queries, keys)
        looks.added_step = added.stride()
    looks.added = None if added is None else added.data_ptr()
    looks.hides = added is not None and added.dtype == torch.bool
    if held is not None:
        looks.held_step = held.stride(0)
    looks.held = None if held is None else held.data_ptr()
    looks.keys, looks.threads = keys, threads(made.wants[0] * keys)
    made.key_slot, made.value_slot = k + slot * step, v + slot * v_step
    if spin is not None:
        rows, made.pairs = spin.cos.shape
        made.cos, made.sin, made.halves = spin.cos.data_ptr(), spin.sin.data_ptr(), spin.halves
        made.pairs_step = made.pairs if rows > 1 else 0
    made.beside = (added, held, spin)
    made.wants[2] = _scores(heads, keys, looks.threads, made.size)


class Program:
    """Branches that are taken one after the other. With the norms before and after each they are added to what comes
    in, and there may be a norm at the end; a branch without them is all."""

    def __init__(
        self, branches: Sequence[Branch], gauges: Sequence[Sequence[Gauge | None]] = (), end: Gauge | None = None
    ):
        self.gauges, self.end = gauges, end
        for one, (before, after) in zip(branches, gauges, strict=False):
            one.adds, one.before, one.after = 1, before and addressof(before), after and addressof(after)
        self.every = (Branch * len(branches))(*branches)
        self.branches = list(self.every)  # the same, where they lie now
        for new, old in zip(self.branches, branches, strict=True):
            vars(new).update(vars(old))
        self.work = sum(one.work for one in branches)

    def run(self, known: Kernels, x: Tensor) -> Tensor:
        """x (rows, width), contiguous"""
        rows, wide = x.shape
        y, size, last = x.new_empty(rows, self.branches[-1].leaves), x.element_size(), self.end
        most = list(map(max, zip(*[one.wants for one in self.branches], strict=True)))
        parts = (rows * wide, rows * wide, *most[:3], (rows + known.rows) * (most[3] + 1))
        begins = list(accumulate([-(-part * size // 64) * 64 for part in parts], initial=0))
        beside = torch.empty(begins[-1] + 64, dtype=torch.uint8)
        origin = -(-beside.data_ptr() // 64) * 64
        known.named["run", x.dtype](
            self.every, len(self.branches), last and addressof(last), x.data_ptr(), y.data_ptr(),
            Room(*[origin + begin for begin in begins[:-1]]), rows, wide, threads(self.work * max(rows // 16, 1)),
        )  # fmt: skip
        return y


def gauge(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centres: bool) -> Gauge | None:
    """A norm of vectors x, if its numbers are of the same kind."""
    if any(t is not None and (t.dtype != x.dtype or not t.is_contiguous()) for t in (weight, bias)):
        return None
    return Gauge(*(None if t is None else t.data_ptr() for t in (weight, bias)), eps, centres)


def likeliest(
    known: Kernels, x: Tensor, packed: Tensor, bias: Tensor | None, words: int, many: int
) -> tuple[Tensor, Tensor]:
    """x (rows, in) -> of each row the `many` likeliest of all words, best first: log p and numbers, (rows, many)."""
    rows, wide = x.shape
    bias = None if bias is None else bias.contiguous()
    best, mass = x.new_empty(rows, many), x.new_empty(rows)
    at = torch.empty(rows, many, dtype=torch.long)
    turned = x.new_empty(-(-rows // known.rows) * known.rows, wide)
    state = torch.empty(rows * known.state[x.dtype] + 64, dtype=torch.uint8)
    known.named["likeliest", x.dtype](
        x.data_ptr(), packed.data_ptr(), None if bias is None else bias.data_ptr(), best.data_ptr(), at.data_ptr(),
        mass.data_ptr(), turned.data_ptr(), -(-state.data_ptr() // 64) * 64, rows, wide, words, many,
    )  # fmt: skip
    return best - best[:, :1] - mass.log()[:, None], at
