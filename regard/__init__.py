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
    """Import torch when something that needs it is first asked for: the command line answers `--help` without."""
    if name != "core" and name not in __all__:
        raise AttributeError(f"module 'regard' has no attribute '{name}'")
    if name == "UserError":
        return import_module(".errors", __name__).UserError
    core = import_module(".core", __name__)
    return core if name == "core" else getattr(core, name)


def load(folder: str | Path | Sequence[str | Path], device: str = "cpu", int8: bool = False) -> Run:
    """A run folder, as `regard train` leaves it: a model with its tokenizers, ready to predict. Several folders: their
    models answer together. int8: with weights of eight bits, which decode faster on a CPU."""
    from .tasks.load import load  # brings tokenizers and much else along

    return load(folder, device, int8)
