"""Kernels in the processor's own language: native.cpp for decoding and learn.cpp for learning, compiled once for this
machine by the compiler that is there, in some seconds, when first wanted. Where there is none, or REGARD_NATIVE is 0,
torch's operations do the same. Here is how they are made, and those for decoding; the others are in learn.py.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from ctypes import POINTER, Structure, c_double, c_int, c_int64, c_long, c_uint64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

SOURCES = [Path(__file__).with_name(name) for name in ("native.cpp", "learn.cpp")]
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

    def __deepcopy__(self, memo: dict) -> Map:
        return Map()


class Looks(Structure):
    """As native.cpp has it."""

    _fields_ = (
        [(name, c_void_p) for name in ("q", "k", "v", "added", "held", "y", "room")]
        + [
            (name, c_int64)
            for name in ("batch", "heads", "groups", "queries", "keys", "dim", "value_dim", "hides", "held_step")
        ]
        + [("threads", c_int64)]
        + [(name, c_int64 * 3) for name in ("q_step", "k_step", "v_step")]
        + [("added_step", c_int64 * 4)]
    )


class Step(Structure):
    """As native.cpp has it."""

    _fields_ = (
        ("looks", Looks),
        *((name, POINTER(Map)) for name in ("query", "key", "value", "last")),
        *((name, c_void_p) for name in ("x", "asked", "found", "y", "key_slot", "value_slot", "room")),
        ("rows", c_int64),
        ("threads", c_int64),
        ("scale", c_double),
    )


_POINTERS, _SIZES = [c_void_p], [c_long]
TAKES = {
    "apply": [POINTER(Map), *_POINTERS * 2, c_long, c_void_p, c_int],
    "mlp": [POINTER(Map), POINTER(Map), c_int, *_POINTERS * 4, c_long, c_int],
    "attend": [POINTER(Looks)],
    "step": [POINTER(Step)],
    "pack": [*_POINTERS * 2, *_SIZES * 2],
    "likeliest": [*_POINTERS * 8, *_SIZES * 3, c_int],
    "row": [],
    # for learning
    "see": _POINTERS,
    "unsee": _POINTERS,
    "room": _POINTERS,
    "bend": [*_POINTERS * 2, c_long, c_int, c_int],
    "unbend": [*_POINTERS * 3, c_long, c_int, c_int],
    "drop": [*_POINTERS * 3, c_long, c_int, c_double, c_uint64, c_int],
    "powers": [*_POINTERS * 6, *_SIZES * 2, c_int],
}


class Kernels:
    """The compiled functions, by name and by kind of number."""

    def __init__(self, library: ctypes.CDLL):
        self.rows, panel, self.keep = (library.sizes(which) for which in range(3))
        self.panel = {dtype: panel // dtype.itemsize for dtype in KINDS}
        self.named = {}
        for name, takes in TAKES.items():
            for dtype, kind in KINDS.items():
                function = getattr(library, f"{name}_{kind}")
                function.argtypes, function.restype = takes, c_long if name in ("row", "room") else None
                self.named[name, dtype] = function
        self.state = {dtype: self.named["row", dtype]() for dtype in KINDS}


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
    """The library that a command makes, as long as source, compiler and processor are these."""
    program = Path(command[0]).resolve()
    version = f"{program} {program.stat().st_size} {program.stat().st_mtime}"
    made_of = (
        *(path.read_bytes() for path in (*SOURCES, HEADER)),
        *(text.encode() for text in (" ".join(command), version, _processor())),
    )
    name = f"native-{hashlib.sha256(b'|'.join(made_of)).hexdigest()[:20]}.so"
    folder = _folder()
    path = folder / name
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            objects = [str(Path(beside) / f"{source.stem}.o") for source in SOURCES]
            _run(*([*command, "-c", str(source), "-o", to] for source, to in zip(SOURCES, objects, strict=True)))
            new = Path(beside) / name
            _run([*command, *objects, "-o", str(new)])
            new.replace(path)
    return path


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


def _folder() -> Path:
    """Where compiled kernels stay: one's own, since what lies there is run."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard"
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(home, os.W_OK) and home.stat().st_uid == os.getuid():
            return home
    except OSError:
        pass
    return Path(_own_folder().name)


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="regard-")  # as long as this process lives


def _processor() -> str:
    """What tells processors apart that do not know the same instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return " ".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def native(first: Tensor, *others: Tensor | None) -> Kernels | None:
    """The kernels, if they can take such tensors: numbers of one kind on a processor, nothing to learn, and nobody who
    watches or records single operations."""
    if torch.is_grad_enabled():
        if first.requires_grad:
            return None
        for other in others:
            if other is not None and other.requires_grad:
                return None
    return able(first, *others)


def able(first: Tensor, *others: Tensor | None) -> Kernels | None:
    """The same, whether they learn or not."""
    dtype = first.dtype
    if dtype not in KINDS or not first.is_cpu:
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


def mlp(known: Kernels, into: Map, out: Map, bend: str, x: Tensor) -> Tensor:
    """x (rows, width), contiguous -> (rows, width): a map, a bend and a map."""
    y, hidden = x.new_empty(x.shape[0], out.out), x.new_empty(x.shape[0], into.out)
    beside = room(known, x, max(into.wide, into.out))
    known.named["mlp", x.dtype](
        into, out, BENDS.index(bend), x.data_ptr(), y.data_ptr(), hidden.data_ptr(), beside.data_ptr(), x.shape[0],
        torch.get_num_threads(),
    )  # fmt: skip
    return y


def attend(known: Kernels, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, held: Tensor | None = None) -> Tensor:
    """q (batch, heads, n, dim), k and v (rows, kv_heads, m, dim), channels side by side; added: to scores, or bool,
    which of them count, broadcast to (batch, heads, n, m); held (batch, m or more): the row of each key, None: the own
    -> (batch, n, heads, dim)"""
    y = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
    looks, kept = _looks(q, k, v, added, held, y)
    known.named["attend", q.dtype](looks)
    del kept
    return y


def _looks(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, held: Tensor | None, y: Tensor
) -> tuple[Looks, tuple[Tensor | None, ...]]:
    """And what it points at that nobody else holds."""
    batch, heads, queries, dim = q.shape
    _, groups, keys, wide = v.shape
    cores = threads(batch * heads * queries * keys * dim)
    scores = q.new_empty(cores, heads, keys + 64 // q.element_size())
    steps: tuple[int, ...] = (0, 0, 0, 0)
    if added is not None:
        added = added.expand(batch, heads, queries, keys)
        steps = added.stride()
    looks = Looks(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), None if added is None else added.data_ptr(),
        None if held is None else held.data_ptr(), y.data_ptr(), scores.data_ptr(), batch, heads, groups, queries, keys,
        dim, wide, added is not None and added.dtype == torch.bool, 0 if held is None else held.stride(0), cores,
        q.stride()[:3], k.stride()[:3], v.stride()[:3], steps,
    )  # fmt: skip
    return looks, (scores, added)


def step(
    known: Kernels,
    x: Tensor,
    maps: tuple[Map, Map | None, Map | None, Map],
    k: Tensor,
    v: Tensor,
    slot: int,
    scale: float,
    added: Tensor | None,
    held: Tensor | None,
    queries: int = 1,
) -> Tensor:
    """The next position of rows x (rows, width): maps to queries (rows, heads * dim), keys, values, and back. k and v
    (stored, kv_heads, m, dim) are looked at, once keys and values of x are in their `slot`; without maps to these, as
    they are, by `queries` rows each. -> (rows, out)"""
    query, key, value, last = maps
    rows, dim, wide = x.shape[0], k.shape[3], v.shape[3]
    heads = query.out // dim
    asked, found = x.new_empty(rows, heads * dim), x.new_empty(rows, heads * wide)
    y, beside = x.new_empty(rows, last.out), room(known, x, max(query.wide, last.wide))
    by_head = asked.view(rows // queries, queries, heads, dim).transpose(1, 2)
    looks, kept = _looks(by_head, k, v, added, held, found)
    size = x.element_size()
    known.named["step", x.dtype](
        Step(
            looks, ctypes.pointer(query), key and ctypes.pointer(key), value and ctypes.pointer(value),
            ctypes.pointer(last), x.data_ptr(), asked.data_ptr(), found.data_ptr(), y.data_ptr(),
            k.data_ptr() + slot * k.stride(2) * size, v.data_ptr() + slot * v.stride(2) * size, beside.data_ptr(), rows,
            torch.get_num_threads(), scale,
        )
    )  # fmt: skip
    del kept
    return y


def pack(known: Kernels, table: Tensor) -> Tensor:
    """table (words, in), contiguous, as `likeliest` wants it."""
    words, wide = table.shape
    panel = known.panel[table.dtype]
    packed = table.new_empty(-(-words // panel) * panel, wide)
    known.named["pack", table.dtype](table.data_ptr(), packed.data_ptr(), words, wide)
    return packed


def likeliest(
    known: Kernels, x: Tensor, packed: Tensor, bias: Tensor | None, words: int, many: int
) -> tuple[Tensor, Tensor]:
    """x (rows, in) -> of each row the `many` likeliest of all words, best first: log p and numbers, (rows, many)."""
    rows, wide = x.shape
    best, mass = x.new_empty(rows, many), x.new_empty(rows)
    at = torch.empty(rows, many, dtype=torch.long)
    turned = x.new_empty(-(-rows // known.rows) * known.rows, wide)
    state = torch.empty(rows * known.state[x.dtype] + 64, dtype=torch.uint8)
    known.named["likeliest", x.dtype](
        x.data_ptr(), packed.data_ptr(), None if bias is None else bias.data_ptr(), best.data_ptr(), at.data_ptr(),
        mass.data_ptr(), turned.data_ptr(), -(-state.data_ptr() // 64) * 64, rows, wide, words, many,
    )  # fmt: skip
    return best - best[:, :1] - mass.log()[:, None], at
