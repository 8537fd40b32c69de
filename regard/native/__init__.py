"""The kernels in C++: how they are compiled and loaded, and when they can be used. Nothing outside of this folder knows
ctypes or a private name of torch.

    build.py      compiles vector.h, decode.cpp, train.cpp and matmul.cpp for this machine, once, and loads the library
    structs.py    the C++ structs as ctypes has them
    private.py    the private names of torch that regard uses
    decode.py     a decoding step: linear maps of few rows, attention over a cache, a whole stack in one call
    train.py      attention, feed-forwards, embeddings and dropout with their gradients
    matmul.py     matrix products of many rows
"""

from .build import (
    Kernels,
    disabled,
    find_compiler,
    inference_kernels,
    load_kernels,
    threads_for,
    training_kernels,
    why_unavailable,
)  # fmt: skip

__all__ = [
    "Kernels", "disabled", "find_compiler", "inference_kernels", "load_kernels", "threads_for", "training_kernels",
    "why_unavailable",
]  # fmt: skip
