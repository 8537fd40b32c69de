"""Files and folders that others may have made: what is written stays on the disk, and nothing outside is touched."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk, so that what is written later cannot be there first."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
