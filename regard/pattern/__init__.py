"""Patterns: who may look at whom. The algebra, its text form, and what is derived from a pattern."""

from .algebra import Pattern

__all__ = ["Pattern"]
