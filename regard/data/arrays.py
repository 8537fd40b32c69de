"""Read the arrays of an .npz file. The sizes in its headers are checked against the file before memory is allocated."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from regard.core import UserError
from regard.errors import in_one_line, short
from regard.files.reading import npy_bytes
from regard.memory import check_fits_memory

BROKEN = (
    OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, KeyError,
    TypeError, OverflowError, MemoryError,
)  # fmt: skip


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays by name. Arrays of Python objects, which would be unpickled, are refused."""
    try:
        with zipfile.ZipFile(path) as archive:
            check_fits_memory(f"{short(path)}, unzipped,", sum(member.file_size for member in archive.infolist()))
            for member in archive.infolist():
                _check_size(archive, member)
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except BROKEN as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{short(path)} cannot be read: {in_one_line(error)}") from None


def _check_size(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Refuse an array whose header announces more bytes than the file holds."""
    if not member.filename.endswith(".npy"):
        return
    with archive.open(member) as file:
        announced = npy_bytes(file)
        if announced > member.file_size:
            raise ValueError(f"{member.filename} announces {announced:,} bytes, and holds {member.file_size:,}")
