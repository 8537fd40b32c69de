"""Record how a run folder came to be: the command, where and when it was given, and the versions."""

from __future__ import annotations

import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from regard.data.folder import exists

PACKAGES = ("regard", "torch", "numpy", "tokenizers", "safetensors", "pyarrow", "sacrebleu")
PATHS = ("data", "dev", "test")  # entries of a job that may be paths


def session_record() -> dict[str, Any]:
    """Return the record of one start or resumption of a run."""
    when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {"command": sys.argv, "folder": os.getcwd(), "time": when, "versions": versions()}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def absolute_paths(text: str | None) -> str | None:
    """Return one path, or two with a comma between, as absolute paths; other words are unchanged."""
    if text is None or exists(Path(text)):
        return text and str(Path(text).absolute())
    return ",".join(str(Path(one).absolute()) if exists(Path(one)) else one for one in text.split(","))
