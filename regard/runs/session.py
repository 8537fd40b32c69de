"""What a run folder tells about how it came to be: the command, where and when it was given, and the versions."""

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
PATHS = ("data", "dev", "test")  # what a job says that may be paths


def session() -> dict[str, Any]:
    """One time that a run was begun or gone on with."""
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
    """Paths, one or two with a comma between, so that they hold from anywhere; other words as they are."""
    if text is None or exists(Path(text)):
        return text and str(Path(text).absolute())
    return ",".join(str(Path(one).absolute()) if exists(Path(one)) else one for one in text.split(","))
