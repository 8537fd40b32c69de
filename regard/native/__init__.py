"""The kernels in C++: how they are compiled and loaded, and when they can be used. Nothing outside of this folder knows
ctypes or a private name of torch.

    build.py      compiles vector.h, decode.cpp, train.cpp and matmul.cpp for this machine, once, and loads the library
    structs.py    the C++ structs as ctypes has them
    private.py    the private names of torch that regard uses
    decode.py     a decoding step: linear maps of few rows, attention over a cache, a whole stack in one call
    train.py      attention, feed-forwards, embeddings and dropout with their gradients
    matmul.py     matrix products of many rows
    malloc.py     what the C library does with freed memory
"""
