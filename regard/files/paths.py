"""Check folders that somebody else may have made, and write files that must survive a crash.

A run folder or a model folder may hold symbolic links, and name other files. Those that lead outside are refused before
anything is read or written, as are pipes, sockets and devices.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from regard.errors import UserError, short

RUN_SUBFOLDERS = ("checkpoints", "data", "origin")  # other subfolders of a run folder are never opened


def check_run_folder(folder: Path) -> None:
    """Refuse a run folder, which may be a link itself, with anything in it that leads outside."""
    known = folder.iterdir() if folder.is_dir() else ()
    _check(folder, [path for path in known if path.is_symlink() or not path.is_dir() or path.name in RUN_SUBFOLDERS])


def check_model_folder(folder: Path) -> None:
    """Refuse a folder in the Hugging Face layout with anything in it that leads outside. Files of the hub's cache are
    links to ../../blobs, which is allowed: these folders are only read."""
    snapshots = next((parent for parent in folder.resolve().parents if parent.name == "snapshots"), None)
    _check(folder, list(folder.iterdir()), None if snapshots is None else snapshots.parent / "blobs")


def check_files(folder: Path, *names: str) -> None:
    """Refuse these files or subfolders of a folder, as far as they are there, when they lead outside."""
    _check(folder, [path for path in (folder / name for name in names) if os.path.lexists(path)])


def named_path(folder: Path, name: object) -> Path | None:
    """Return the path that a file in this folder names, or None when it leaves the folder."""
    if not isinstance(name, str) or os.path.isabs(name) or ".." in Path(name).parts:
        return None
    return folder / name


def copy_files(source: Path, target: Path) -> None:
    """Copy a folder with all files in it. Links to folders are left out, as they may contain themselves."""

    def links(folder: str, names: list[str]) -> list[str]:
        paths = ((name, Path(folder) / name) for name in names)
        return [name for name, path in paths if path.is_symlink() and not path.is_file()]

    shutil.copytree(source, target, ignore=links, dirs_exist_ok=True)


def sync(path: Path) -> None:
    """Wait until a file or a folder is on disk, so that nothing written later can be there before it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check(folder: Path, paths: list[Path], blobs: Path | None = None) -> None:
    """Refuse links that leave the folder, and special files. paths: in this folder, checked with all that is below
    them; links to folders are not followed."""
    root = folder.resolve()
    try:
        while paths:
            path = paths.pop()
            if path.is_symlink() and not _stays_inside(path, root, blobs):
                raise UserError(
                    f"{short(path)} is a link that leaves {short(folder)}, and such links are not followed: put the "
                    "file itself there, or remove the link"
                )
            if path.exists() and not path.is_dir() and not path.is_file():
                raise UserError(f"{short(path)} is neither a file nor a folder: remove it")
            if path.is_dir() and not path.is_symlink():
                paths += path.iterdir()
    except OSError as error:
        raise UserError(f"{short(path)} cannot be read: {error.strerror}") from None


def _stays_inside(link: Path, root: Path, blobs: Path | None) -> bool:
    try:
        target = link.resolve()
    except (OSError, RuntimeError):  # the link is circular
        return False
    return target.is_relative_to(root) or (target.parent == blobs and target.is_file())


def must_be_new(out: Path) -> None:
    """Refuse an output folder that is not empty."""
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise UserError(f"{short(out)} is there already: name a new folder")
