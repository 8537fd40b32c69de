"""The structs of the C++ sources as ctypes structures. `check_sizes` compares their sizes with the compiler's when the
library is loaded: a field that is missing on one side would be read from another's memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, c_double, c_int64, c_void_p

from torch import Tensor


class LinearParams(Structure):
    """The struct of decode.cpp. A copy or a pickle of it is empty, since its pointers would not be valid."""

    _fields_ = [(name, c_void_p) for name in ("weight", "bias", "packed", "scale", "sums")] + [
        ("wide", c_int64),
        ("out", c_int64),
    ]
    held: tuple[Tensor | None, ...] = (None,)  # keeps the tensors alive that it points at

    def __reduce__(self) -> tuple:
        return LinearParams, ()


class AttentionArgs(Structure):
    """The struct of decode.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "added", "held", "y", "room")),
        *((name, c_int64) for name in ("batch", "heads", "groups", "queries", "keys", "dim", "value_dim", "hides")),
        *((name, c_int64) for name in ("held_step", "threads")),
        *((name, c_int64 * 3) for name in ("q_step", "k_step", "v_step")),
        ("added_step", c_int64 * 4),
        ("scale", c_double),
    )


class NormParams(Structure):
    """The struct of decode.cpp."""

    _fields_ = (*((name, c_void_p) for name in ("weight", "bias")), ("eps", c_double), ("centres", c_int64))


class FusedBranch(Structure):
    """One branch of a layer, attention or a feed-forward, for a step of one position; the struct of decode.cpp.

    maps: the linear layers that it points at; beside: the other tensors, kept alive.
    wants: elements of workspace for queries or activations, for the attention output and for scores; and the channels
        of its widest input.
    work: the approximate number of multiplications for a row.
    leaves: the output channels.
    slots, looked, size: for attention: addresses and slot strides of keys and values; batch, heads and queries; bytes
        of an element.
    """

    _fields_ = (
        ("looks", AttentionArgs),
        *((name, c_void_p) for name in ("before", "after", "first", "key", "value", "last", "cos", "sin")),
        *((name, c_void_p) for name in ("key_slot", "value_slot")),
        *((name, c_int64) for name in ("attends", "how", "adds", "pairs", "pairs_step", "halves")),
    )
    maps: Sequence[LinearParams | None]
    beside: tuple
    wants: list[int]
    work: int
    leaves: int
    slots: tuple[int, int, int, int]
    looked: tuple[int, int, int]
    size: int


class Workspace(Structure):
    """The struct of decode.cpp."""

    _fields_ = [(name, c_void_p) for name in ("normed", "found", "middle", "other", "scores", "maps")]
    held: Tensor  # the memory that it points into


class SearchArgs(Structure):
    """The struct of decode.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("table", "added", "output", "x", "logits")),
        *((name, c_void_p) for name in ("held", "tokens", "parents", "totals")),
        *((name, c_int64) for name in ("size", "wide", "slots", "steps", "first", "end")),
        ("scale", c_double),
    )


ADDS = ("q_add", "k_add", "v_add")


class TrainAttentionArgs(Structure):
    """The struct of train.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "v", "added", "y", "mass", "dy", "dq", "dk", "dv", "room")),
        *((name, c_int64) for name in ("batch", "heads", "groups", "queries", "keys", "dim", "causal", "hides")),
        *((name, c_int64) for name in ("room_step", "threads")),
        *((name, c_int64 * 3) for name in ("q_step", "k_step", "v_step")),
        ("added_step", c_int64 * 4),
        ("scale", c_double),
        *((name, c_void_p) for name in ADDS),
    )


class MatmulArgs(Structure):
    """The struct of matmul.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "panels", "bias", "y", "room", "hidden", "activated")),
        *((name, c_int64) for name in ("rows", "wide", "deep", "x_row", "x_deep", "y_row", "adds", "how", "threads")),
    )


# In the order of `struct_size` in decode.cpp, train.cpp and matmul.cpp.
SIZED = {
    "decode": (LinearParams, AttentionArgs, NormParams, FusedBranch, Workspace, SearchArgs),
    "train": (TrainAttentionArgs,),
    "matmul": (MatmulArgs,),
}


def check_sizes(library: ctypes.CDLL) -> None:
    """Raise where a struct is not as large here as in the library."""
    for source, structs in SIZED.items():
        of = getattr(library, f"struct_size_{source}")
        for index, struct in enumerate(structs):
            if ctypes.sizeof(struct) != of(index):
                raise OSError(
                    f"{struct.__name__} has {ctypes.sizeof(struct)} bytes here and {of(index)} in {source}.cpp"
                )
