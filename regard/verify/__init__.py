"""What holds: the laws on anything built, the originals' numbers, and reports of both. Nothing here prints."""

from .laws import Finding, check

__all__ = ["Finding", "check"]
