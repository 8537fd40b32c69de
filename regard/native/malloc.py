"""How the C library's malloc treats freed memory, on Linux."""

import ctypes
import sys
from functools import cache

LARGE = 1 << 30  # bytes, up to which memory is not asked of the system piece by piece
MMAP_THRESHOLD, TRIM_THRESHOLD, TOP_PAD, ARENA_MAX = -3, -1, -2, -8  # as malloc.h has them
PAGE, HUGE_PAGES = 2 << 20, 14  # bytes of a huge page; as madvise knows it


@cache
def keep_memory() -> bool:
    """What is freed stays with this process for what comes next. Otherwise glibc gives large tensors back to the
    system, and the next ones are made of fresh pages, which takes longer than to fill them. Whether it is so now."""
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    asked = {MMAP_THRESHOLD: LARGE, TRIM_THRESHOLD: 2 * LARGE - 1, TOP_PAD: 1 << 26, ARENA_MAX: 1}
    try:
        kept = min(library.mallopt(what, much) for what, much in asked.items()) == 1
    except AttributeError:
        return False  # another library
    if kept:
        _in_huge_pages(library)
    return kept


def give_back_memory() -> None:
    """What is free now goes back to the system: forks would hold it, too, and each would soon have its own."""
    if keep_memory():
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        _in_huge_pages(library)


def _in_huge_pages(library: ctypes.CDLL) -> None:
    """The memory that malloc takes next comes in pages of two megabytes, where the system gives them to whoever asks:
    there are fewer to make and to look up. It is asked for at once and freed again, so that nothing of it is used."""
    library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    size = LARGE - PAGE
    room = library.malloc(size)
    if room is not None:
        begin, end = -(-room // PAGE) * PAGE, (room + size) // PAGE * PAGE
        library.madvise(begin, end - begin, HUGE_PAGES)  # who says no is asked no more
        library.free(room)
