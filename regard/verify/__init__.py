"""Verification: the laws on any module, parity with original implementations, and reports of both. Nothing here
prints."""

from .laws import Finding, check

__all__ = ["Finding", "check"]
