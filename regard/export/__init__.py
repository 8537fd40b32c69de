"""For those who leave: a run as a model of another program. One file for each program."""

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
}  # and the packages they take


def export(folder: str | Path, target: str | Path, to: str, numbers: str | None = None) -> list[Path]:
    """The run in `folder`, for program `to`, into the new folder `target`. The files that were written.

    numbers: how the other program keeps weights, in its own words (int8, float16, ...); None: as they are.
    """
    from regard.tasks.load import load

    if to not in PROGRAMS:
        raise UserError(f"models are exported to {' or '.join(PROGRAMS)}, not to '{to}'{nearest(to, PROGRAMS)}")
    for package in PROGRAMS[to]:
        try:
            import_module(package)
        except ImportError:
            raise UserError(f"to write for {to}, its own package is needed: pip install {package}") from None
    target = Path(target)
    must_be_new(target)
    run = load(folder)
    module = import_module(f".{to}", __name__)
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)  # of one that was killed
    part.mkdir(parents=True)
    try:
        module.write(run, part, numbers)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return sorted(target.iterdir())
