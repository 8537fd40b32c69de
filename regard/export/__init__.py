"""Export a run as a model of another program. One file for each program."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path

from regard.core import UserError
from regard.errors import nearest
from regard.files.paths import must_be_new

PROGRAMS = {
    "ctranslate2": ("ctranslate2",),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
}  # program -> the packages that it needs


def export(folder: str | Path, target: str | Path, to: str, numbers: str | None = None) -> list[Path]:
    """Export the run in `folder` for the program `to` into a new folder, and return the files that were written.

    numbers: the number format of the weights, as the other program names it (int8, float16, ...); None: unchanged.
    """
    from regard.tasks.load import load

    if to not in PROGRAMS:
        raise UserError(f"models are exported to {' or '.join(PROGRAMS)}, not to '{to}'{nearest(to, PROGRAMS)}")
    for package in PROGRAMS[to]:
        try:
            import_module(package)
        except ImportError:
            raise UserError(f"to export to {to}, its package is needed: pip install {package}") from None
    target = Path(target)
    must_be_new(target)
    run = load(folder)
    module = import_module(f".{to}", __name__)
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)  # left by an export that was killed
    part.mkdir(parents=True)
    try:
        module.write(run, part, numbers)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return sorted(target.iterdir())
