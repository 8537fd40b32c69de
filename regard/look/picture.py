"""Writing pictures to files atomically, with clear errors."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from regard.core import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # slow to import, and needed for images alone


def check_path(path: str | Path) -> Path:
    """Return the path of a picture if its folder exists; call this before drawing."""
    path = Path(path)
    if not path.absolute().parent.is_dir():
        raise UserError(f"there is no folder '{path.parent}' to write the picture '{path.name}' to")
    return path


def write(figure: Figure, path: str | Path, dpi: int | None = None) -> Path:
    """Write the figure as PNG, under a temporary name until it is complete."""
    path = check_path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a box is drawn instead
            warnings.filterwarnings(
                "ignore", message="Matplotlib currently does not support"
            )  # text shaping of some scripts
            figure.savefig(temporary, format="png", **({} if dpi is None else {"dpi": dpi}))
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"the picture '{path}' cannot be written: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return path
