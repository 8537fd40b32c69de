"""The arrays of an .npz file: what they announce is checked against what is there before memory is taken."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from regard.core import UserError
from regard.errors import in_one_line, short
from regard.files.reading import announced_bytes
from regard.memory import check_fits_memory

BROKEN = (
    OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, KeyError,
    TypeError, OverflowError, MemoryError,
)  # fmt: skip


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """By name. Objects, which would be pickles, are refused."""
    try:
        with zipfile.ZipFile(path) as held:
            check_fits_memory(f"{short(path)}, unzipped,", sum(one.file_size for one in held.infolist()))
            for one in held.infolist():
                _must_hold(held, one)
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except BROKEN as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{short(path)} cannot be read: {in_one_line(error)}") from None


def _must_hold(held: zipfile.ZipFile, one: zipfile.ZipInfo) -> None:
    """Refuse an array whose header announces more than the file has."""
    if not one.filename.endswith(".npy"):
        return
    with held.open(one) as file:
        announced = announced_bytes(file)
        if announced > one.file_size:
            raise ValueError(f"{one.filename} announces {announced:,} bytes, and holds {one.file_size:,}")
