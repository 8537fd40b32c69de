"""Write what a teacher answers to some sources, as training data for another model: sequence-level distillation.

    regard distill runs/teacher --data pairs.tsv --out distilled.tsv

The answers are simpler and more alike than what people wrote, which helps a model that is weaker than its teacher, and
most of all one that writes all tokens at once. The file is written in pieces: FILE.part holds those that are done, and
FILE.part.json says how many, and of what they were made. After a kill the next call goes on behind the last whole
piece, and the result is the same as without. Kim and Rush 2016, "Sequence-Level Knowledge Distillation",
arXiv:1606.07947.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypedDict

import torch

from regard.core import UserError
from regard.data import CorpusSplit
from regard.decode import DecodeConfig
from regard.errors import short
from regard.files.reading import Natural, read_json
from regard.runs import checkpoint
from regard.tasks.run import Run

PIECE = 512  # sources that are answered and written together
FORMATS = (".tsv", ".jsonl")
FORBIDDEN = str.maketrans("\t\n\r", "   ")  # in a cell of a TSV file
VERSION = 1  # of the format of the state


class State(TypedDict):
    """What FILE.part holds: of which teacher, data and settings, how many sources, pairs and bytes."""

    key: str
    sources: Natural
    pairs: Natural
    empty: Natural
    bytes: Natural


class Distilled(NamedTuple):
    """The counts of a distilled file."""

    sources: int
    pairs: int
    empty: int  # answers without any text, which are left out

    def __str__(self) -> str:
        left_out = f", without {self.empty:,} empty answers" if self.empty else ""
        return f"{self.pairs:,} pairs of {self.sources:,} sources{left_out}"


def distill(
    teacher: Any,
    lines: CorpusSplit,
    out: Path,
    config: DecodeConfig | None = None,
    samples: int = 1,
    tick: Callable[[int], None] = lambda done: None,
) -> Distilled:
    """Write each source of the lines with the teacher's answers to it.

    teacher: a run that turns a text into another.
    out:     a .tsv or a .jsonl file, which must not exist yet.
    config:  how to decode; None: as the teacher's recipe says. With several `num_return`, every answer is written.
    samples: the number of random answers to each source, where the config samples.
    tick:    called with the number of sources done since the last call; those of an earlier call come first.
    """
    check_teacher(teacher)
    config = teacher.config if config is None else config
    _check_out(out)
    if samples > 1 and not config.samples:
        raise UserError("several samples of each source need a temperature, such as 1.0")
    if config.samples and config.seed is None:
        config = replace(config, seed=1)  # so that a killed run goes on with the same answers
    made_of = [VERSION, _weights(teacher), lines.key(), asdict(config), samples, out.suffix]
    key = hashlib.sha256(json.dumps(made_of, sort_keys=True, default=str).encode()).hexdigest()
    if out.suffix == ".tsv":
        _check_cells(lines)
    with _opened(out, key, lines.count or 0) as (file, state):
        tick(state["sources"])
        rows = islice(lines, state["sources"], None)
        while piece := [row[0] for row in islice(rows, PIECE)]:
            for source, answers in zip(piece, _answers(teacher, piece, config, samples), strict=True):
                for answer in dict.fromkeys(answers):
                    text = answer.translate(FORBIDDEN) if out.suffix == ".tsv" else answer
                    state["empty" if not text.strip() else "pairs"] += 1
                    if text.strip():
                        file.write(_line(source, text, out.suffix))
            state["sources"] += len(piece)
            _save_state(file, out, state)
            tick(len(piece))
        if not state["pairs"]:
            raise UserError(f"{short(teacher.folder)} has nothing to say to any of the {state['sources']:,} sources")
    return Distilled(state["sources"], state["pairs"], state["empty"])


def check_teacher(teacher: Any) -> None:
    """Refuse a run that does not turn a text into another."""
    if not isinstance(teacher, Run) or not teacher.pairs or teacher.takes != "texts":
        folder = getattr(teacher, "folder", None)
        raise UserError(
            f"{short(folder) if folder else 'the teacher'} is not an encoder-decoder that turns a text into another: "
            "a teacher is a run such as 'regard train transformer-preln --data PAIRS' leaves it"
        )


def _answers(teacher: Run, sources: list[str], config: DecodeConfig, samples: int) -> list[list[str]]:
    """Return the texts of all answers to each source."""
    found: list[list[str]] = [[] for _ in sources]
    for number in range(samples):
        seed = None if config.seed is None else config.seed + number
        for own, answers in zip(found, teacher.predict(sources, replace(config, seed=seed)), strict=True):
            own += [answer.text for answer in answers]
    return found


def _weights(teacher: Run) -> str:
    """Return a hash of the teacher's weights."""
    digest = hashlib.sha256()
    for name, tensor in teacher.model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _check_out(out: Path) -> None:
    if out.suffix not in FORMATS:
        raise UserError(f"{short(out)}: pairs are written as .tsv or .jsonl; name a file that ends so")
    if out.exists():
        raise UserError(f"{short(out)} exists already: name another file, or remove it")


def _check_cells(lines: CorpusSplit) -> None:
    for number, row in enumerate(lines, 1):
        if any(mark in row[0] for mark in "\t\n\r"):
            raise UserError(
                f"source {number} of {lines.name} holds a tab or a line break, which a .tsv file cannot: let --out end "
                "in .jsonl"
            )


def _line(source: str, target: str, suffix: str) -> bytes:
    pair = {"source": source, "target": target}
    text = "\t".join(pair.values()) if suffix == ".tsv" else json.dumps(pair, ensure_ascii=False)
    return f"{text}\n".encode("utf-8", "replace")


def _state_path(out: Path) -> Path:
    return out.with_name(out.name + ".part.json")


@contextmanager
def _opened(out: Path, key: str, count: int) -> Iterator[tuple[BinaryIO, State]]:
    """Yield the unfinished file, cut behind its last whole piece, and its state; at the end the file gets its name.
    count: the number of sources."""
    part, state_path = out.with_name(out.name + ".part"), _state_path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for path in (part, state_path, state_path.with_name(state_path.name + ".part")):
            if os.path.lexists(path) and (path.is_symlink() or not path.is_file() or path.stat().st_nlink > 1):
                raise UserError(f"{short(path)} is a link or no file: remove it")
        with open(part, "a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{short(part)} is being written by another process: wait for it, or stop it") from None
            if not part.exists() or not os.path.samestat(os.fstat(file.fileno()), part.stat()):
                raise UserError(f"{short(out)} was finished by another process in this moment")
            _check_out(out)  # again, as another process may have finished it before the lock
            state = _load_state(out, key, file, count)
            file.truncate(state["bytes"])
            file.seek(0, os.SEEK_END)
            _save_state(file, out, state)
            yield file, state
            state_path.unlink(missing_ok=True)
            part.replace(out)
    except OSError as error:
        raise UserError(f"{short(out)} cannot be written: {checkpoint.reason(error)}") from None


def _load_state(out: Path, key: str, file: BinaryIO, count: int) -> State:
    """Return the state of an unfinished file of the same making; a new one if the file is empty."""
    new: State = {"key": key, "sources": 0, "pairs": 0, "empty": 0, "bytes": 0}
    path = _state_path(out)
    size = os.fstat(file.fileno()).st_size
    if not path.exists():
        if size:
            raise UserError(
                f"{short(file.name)} is in the way: it holds something, and no {path.name} tells what; remove it"
            )
        return new
    if not size:  # the pairs were removed
        return new
    state = read_json(path, State)
    damaged = f"{short(path)} is damaged: remove it and {short(file.name)} to begin anew"
    if state["bytes"] > size:
        raise UserError(damaged)
    if state["key"] != key:
        raise UserError(
            f"{short(out)} was begun with another teacher, other data or other settings, and {state['sources']:,} "
            f"sources of it are done: repeat that command, or remove {short(path)} and {short(file.name)} to begin anew"
        )
    file.seek(0)
    if state["sources"] > count or sum(1 for _ in _lines_up_to(file, state["bytes"])) != state["pairs"]:
        raise UserError(damaged)
    return state


def _lines_up_to(file: BinaryIO, end: int) -> Iterator[bytes]:
    """Yield the lines of the first bytes, the last one also where it is not whole."""
    while file.tell() < end:
        yield file.readline(end - file.tell())


def _save_state(file: BinaryIO, out: Path, state: State) -> None:
    """Write the state behind the piece that it counts, so that a kill in between loses that piece alone."""
    file.flush()
    os.fsync(file.fileno())
    state["bytes"] = file.tell()
    checkpoint.write_atomically(_state_path(out), json.dumps(state))
