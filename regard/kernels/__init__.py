"""One attention function, several ways to compute it, all tested against reference.py."""

from .attend import Attend
from .see import See

__all__ = ["Attend", "See"]
