"""Attention patterns: which queries may attend to which keys. The algebra, its text form, and its analysis."""

from .algebra import Pattern

__all__ = ["Pattern"]
