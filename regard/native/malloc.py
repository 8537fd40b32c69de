"""How the C library's malloc treats freed memory, on Linux."""

import ctypes
import sys
from functools import cache

LARGE = 1 << 30  # bytes, up to which malloc does not use mmap for each block
MMAP_THRESHOLD, TRIM_THRESHOLD, TOP_PAD, ARENA_MAX = -3, -1, -2, -8  # from malloc.h
PAGE, HUGE_PAGES = 2 << 20, 14  # bytes of a huge page; MADV_HUGEPAGE


@cache
def keep_memory() -> bool:
    """Let freed memory stay with this process, and return whether that worked. Otherwise glibc returns large tensors to
    the system, and the next ones need fresh pages, which takes longer than to fill them."""
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    asked = {MMAP_THRESHOLD: LARGE, TRIM_THRESHOLD: 2 * LARGE - 1, TOP_PAD: 1 << 26, ARENA_MAX: 1}
    try:
        kept = min(library.mallopt(what, much) for what, much in asked.items()) == 1
    except AttributeError:
        return False  # another library
    if kept:
        _use_huge_pages(library)
    return kept


def give_back_memory() -> None:
    """Return free memory to the system before forking, since every fork would otherwise get its own copy of it."""
    if keep_memory():
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        _use_huge_pages(library)


def _use_huge_pages(library: ctypes.CDLL) -> None:
    """Make malloc's next memory come in huge pages of two megabytes, where the system allows it. A large block is
    allocated, marked and freed again, without being touched."""
    library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = LARGE - PAGE
    room = library.malloc(size)
    if room is not None:
        begin, end = -(-room // PAGE) * PAGE, (room + size) // PAGE * PAGE
        library.madvise(begin, end - begin, HUGE_PAGES)  # a refusal is ignored
        library.free(room)
