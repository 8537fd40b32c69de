"""regard: every Transformer, one core."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core import UserError, add_folder, build, restore, save, select, watch
    from .tasks.run import Run

__all__ = ["UserError", "add_folder", "build", "load", "restore", "save", "select", "watch"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import torch only when something that needs it is used, so that `regard --help` is fast."""
    if name != "core" and name not in __all__:
        raise AttributeError(f"module 'regard' has no attribute '{name}'")
    if name == "UserError":
        return import_module(".errors", __name__).UserError
    core = import_module(".core", __name__)
    return core if name == "core" else getattr(core, name)


def load(folder: str | Path | Sequence[str | Path], device: str = "cpu", int8: bool = False) -> Run:
    """Load a run folder, as `regard train` writes it: a model with its tokenizers, ready to predict. Several folders
    are an ensemble. int8: quantize the weights to 8 bits, which decode faster on a CPU."""
    from .tasks.load import load  # imports tokenizers and much else

    return load(folder, device, int8)
