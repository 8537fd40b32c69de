"""The C++ kernels: how they are compiled, loaded and called. Nothing outside of this folder uses ctypes or a private
name of torch.

    build.py      compiles vector.h, decode.cpp, train.cpp and matmul.cpp for this machine, once, and loads the library
    structs.py    the C++ structs for ctypes
    private.py    the private names of torch that regard uses
    decode.py     a decoding step: linear layers for few rows, attention over a cache, a whole stack in one call
    train.py      attention, feed-forwards, embeddings and dropout with their gradients
    matmul.py     matrix products of many rows
    malloc.py     how malloc treats freed memory
"""
