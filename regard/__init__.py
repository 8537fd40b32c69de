"""regard: every Transformer, one core."""

from .core import UserError, add_folder, build, load, restore, save, select, watch

__all__ = ["UserError", "add_folder", "build", "load", "restore", "save", "select", "watch"]
__version__ = "0.1.0"
