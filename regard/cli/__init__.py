"""The command line: one file for each group of commands. Mistakes are told in a sentence."""

from . import catalog, demo, pack, predict, train
from .app import app, main

__all__ = ["app", "catalog", "demo", "main", "pack", "predict", "train"]
