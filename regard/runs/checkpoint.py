"""Checkpoints that are never half-written: a folder with a temporary name and the hashes of its files is renamed.

runs/x/checkpoints/step-00001000/        model.safetensors  trainer.safetensors  trainer.json  SHA256SUMS
runs/x/checkpoints/step-00001017-extra/  unscheduled: a stop, a new best, or a long time since the last one
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict

from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from regard.core import UserError
from regard.errors import in_one_line, short, shown
from regard.files.paths import check_run_folder, sync
from regard.files.reading import Natural, Range, read_json

MODEL, TENSORS, STATE, SUMS = "model.safetensors", "trainer.safetensors", "trainer.json", "SHA256SUMS"
EXTRA = "-extra"
NAME = re.compile(rf"step-(\d+)({EXTRA})?")


class Best(TypedDict):
    """The best evaluation so far."""

    step: Natural
    metrics: dict[str, Any]


class TrainerState(TypedDict, total=False):
    """The entries of trainer.json."""

    optimizer: str
    step: Natural
    tokens: Natural
    epoch: Natural
    taken: Natural
    elapsed: Annotated[float, Range(0)]
    pending: bool
    best: Best | None
    waited: Natural
    metrics: dict[str, Any]


class Newest(NamedTuple):
    path: Path | None
    numbers: dict[str, Any]  # the contents of its trainer.json
    complaints: list[str]  # a sentence about each newer one that is damaged


def write(
    folder: Path,
    step: int,
    model: nn.Module,
    tensors: dict[str, Tensor],
    numbers: dict[str, Any],
    scheduled: bool = True,
) -> Path:
    """Write a checkpoint and return its folder. If that fails, earlier checkpoints are untouched."""
    final = folder / f"step-{step:08d}{'' if scheduled else EXTRA}"
    part = folder / f".part-{final.name}"
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        save_model(model, str(part / MODEL))
        save_file({name: t.contiguous() for name, t in tensors.items()}, str(part / TENSORS))
        (part / STATE).write_text(json.dumps(numbers, indent=1), encoding="utf-8")
        names = (MODEL, TENSORS, STATE)
        (part / SUMS).write_text(sha256_sums(part, names), encoding="utf-8")
        for name in (*names, SUMS, ""):
            sync(part / name)
        remove(final)
        part.rename(final)
        sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise UserError(
            f"{short(final)}: the checkpoint could not be written: {reason(error)}; those before it are whole, so mend "
            f"that and go on with: regard train --resume {short(folder.parent)}"
        ) from None
    return final


def list_checkpoints(folder: Path, scheduled: bool = False) -> list[Path]:
    """Return the checkpoints, oldest first. scheduled: without the extra ones."""
    named = ((path, NAME.fullmatch(path.name)) for path in folder.glob("step-*"))
    every = [(int(name[1]), not name[2], path) for path, name in named if name and not (scheduled and name[2])]
    return [path for _, _, path in sorted(every)]


def step_of(path: Path) -> int:
    return int(path.name.split("-")[1])


def is_extra(path: Path) -> bool:
    return path.name.endswith(EXTRA)


def find_step(folder: Path, step: int) -> Path | None:
    """Return the checkpoint of a step, if there is one."""
    return next((path for path in reversed(list_checkpoints(folder)) if step_of(path) == step), None)


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that no reader sees half of it."""
    if path.exists():
        gone = path.with_name(f".gone-{path.name}")
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def prune(folder: Path, keep: int, best: Path | None) -> None:
    """Remove all but the newest, the last `keep` scheduled ones and the best; and what a killed process left behind."""
    every = list_checkpoints(folder)
    stay = {*every[-1:], *list_checkpoints(folder, scheduled=True)[-keep:], best}
    for path in every:
        if path not in stay:
            remove(path)
    for path in (*folder.glob(".part-*"), *folder.glob(".gone-*")):
        shutil.rmtree(path, ignore_errors=True)


def check(path: Path) -> dict[str, Any]:
    """Return the contents of trainer.json, after checking the files against their hashes."""
    try:
        lines = (path / SUMS).read_text(encoding="utf-8").splitlines()
        written = {name: digest for digest, name in (line.split("  ") for line in lines)}
        for name in (MODEL, TENSORS, STATE):
            if _hash(path / name) != written[name]:
                raise UserError(f"{short(path / name)} is damaged: its contents are not what was written")
        state = read_json(path / STATE, TrainerState)
        for metrics in (state.get("metrics", {}), (state.get("best") or {}).get("metrics", {})):
            if not all(isinstance(value, int | float) for value in metrics.values()):  # NaN is allowed
                raise UserError(f"{short(path / STATE)}: metrics are numbers, not {shown(metrics)}")
        return state
    except UserError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{short(path)} is not a whole checkpoint: {reason(error)}") from None


def newest(folder: Path, scheduled: bool = False) -> Newest:
    """Return the newest checkpoint that is undamaged, if there is one."""
    complaints: list[str] = []
    for path in reversed(list_checkpoints(folder, scheduled)):
        try:
            return Newest(path, check(path), complaints)
        except UserError as error:
            complaints.append(str(error))
    return Newest(None, {}, complaints)


def newer_than(folder: Path, path: Path) -> list[Path]:
    """Return the checkpoints that are newer than this one."""
    every = list_checkpoints(folder)
    return every[every.index(path) + 1 :]


def final_checkpoints(folder: Path, average: int, best: int | None, say: Callable[[str], None]) -> list[Path]:
    """Return the checkpoints that the final model is made of: the last `average` scheduled ones, or that of the best
    step, or the newest. Damaged ones are reported and left out."""
    scheduled = [path for path in list_checkpoints(folder, scheduled=True) if step_of(path)]
    one = None if best is None else find_step(folder, best)
    wanted = scheduled[-average:] if average else [one or list_checkpoints(folder)[-1]]
    intact = []
    for path in wanted:
        try:
            check(path)
            intact.append(path)
        except UserError as error:
            say(f"{error}; the model is made without it")
    last = newest(folder).path
    if not intact and last is None:
        raise UserError(f"no checkpoint in {short(folder)} is whole, so there is no model")
    return intact or [last]  # type: ignore[list-item]


def save_final(run: Path, tensors: dict[str, Tensor]) -> Path:
    """Write the final weights of a run and their hash."""
    (run / SUMS).unlink(missing_ok=True)  # if the process is killed in between, the weights are just not checked
    write_atomically(run / MODEL, tensors)
    write_atomically(run / SUMS, sha256_sums(run, [MODEL]))
    return run / MODEL


def final_weights(run: Path) -> Path | None:
    """Return the path of the final weights of a run, if there are any; damaged ones are refused."""
    path = run / MODEL
    if not path.is_file():
        return None
    if (run / SUMS).is_file() and sha256_sums(run, [MODEL]) != (run / SUMS).read_text(
        encoding="utf-8", errors="replace"
    ):
        hint = (
            f"; make it anew of its checkpoints: regard train --resume {short(run)}"
            if list_checkpoints(run / "checkpoints")
            else ""
        )
        raise UserError(f"{short(path)} is damaged: its contents are not what was written{hint}")
    return path


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint, so that it is kept but no longer found."""
    aside = path.with_name(f"damaged-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def read(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """Load the weights of a checkpoint into `model` and return the tensors of the trainer."""
    try:
        load_model(model, str(path / MODEL))
        return load_file(str(path / TENSORS))
    except (SafetensorError, RuntimeError, OSError) as error:
        raise UserError(f"{short(path)} does not fit this run: {in_one_line(error)}") from None


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Lock the run folder against other processes. The system releases the lock when the process ends, however it ends.
    A folder that was created here and is still empty afterwards is removed."""
    new = not run.exists()
    try:
        run.mkdir(parents=True, exist_ok=True)
        check_run_folder(run)
        lock = os.open(run / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"{short(run)} cannot be written to: {reason(error)}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.read(lock, 99).decode(errors="replace")
            owner, new = f" ({who})" if who else "", False
            raise UserError(f"{short(run)} is in use by another process{owner}: wait for it, or stop it") from None
        except OSError as error:
            raise UserError(f"{short(run)} cannot be held against other processes: {reason(error)}") from None
        with contextlib.suppress(OSError):  # on a full disk the lock works without the process id in it
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()}".encode(), 0)
        yield
        new = False
    finally:
        if new and [path.name for path in run.iterdir()] == ["lock"]:
            shutil.rmtree(run)
        os.close(lock)


def write_atomically(path: Path, contents: str | dict[str, Tensor]) -> None:
    """Write text or tensors to a temporary file and rename it, so that `path` is never half-written."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(contents.encode() if isinstance(contents, str) else to_bytes(contents, {"format": "pt"}))
        sync(part)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise UserError(f"{short(path)} cannot be written: {reason(error)}") from None


def reason(error: BaseException) -> str:
    """Return the message of an error of the system or a library, in a few words."""
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
        return "the disk is full"
    if isinstance(error, FileNotFoundError):
        return f"there is no {Path(error.filename).name}"
    return getattr(error, "strerror", None) or in_one_line(error)


def sha256_sums(folder: Path, names: Sequence[str]) -> str:
    """Return the hashes of files in the format of sha256sum."""
    return "".join(f"{_hash(folder / name)}  {name}\n" for name in names)


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
