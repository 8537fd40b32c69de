"""The command line: one file for each group of commands. User errors are reported in one sentence."""

from . import (
    catalog,
    convert,
    demo,
    distill,
    doctor,
    evaluate,
    export,
    merge,
    pack,
    predict,
    profile,
    settings,
    shortlist,
    train,
)
from .app import app, main

__all__ = [
    "app",
    "catalog",
    "convert",
    "demo",
    "distill",
    "doctor",
    "evaluate",
    "export",
    "main",
    "merge",
    "pack",
    "predict",
    "profile",
    "settings",
    "shortlist",
    "train",
]
