"""One attention function, several ways to compute it, all tested against reference.py."""

from .attend import Attend
from .attention_mask import AttentionMask

__all__ = ["Attend", "AttentionMask"]
