"""Pictures into files, in one way: the folder must be there, and there is never half a picture."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from regard.core import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # slow to import, and needed for images alone


def place(path: str | Path) -> Path:
    """Where a picture is to go, asked before it is drawn."""
    path = Path(path)
    if not path.absolute().parent.is_dir():
        raise UserError(f"there is no folder '{path.parent}' to write the picture '{path.name}' to")
    return path


def write(drawn: Figure, path: str | Path, dpi: int | None = None) -> Path:
    """As PNG, under another name until it is done."""
    path = place(path)
    half = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # then there is a box for it
            warnings.filterwarnings("ignore", message="Matplotlib currently does not support")  # some scripts' shapes
            drawn.savefig(half, format="png", **({} if dpi is None else {"dpi": dpi}))
        half.replace(path)
    except OSError as error:
        raise UserError(f"the picture '{path}' cannot be written: {error.strerror}") from None
    finally:
        half.unlink(missing_ok=True)
    return path
