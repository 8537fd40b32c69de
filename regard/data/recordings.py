"""Recordings with their texts: read once, stored at 16 kHz in 16 bits, and turned into log-mel frames batch by batch.

train.sounds   an Arrow file: samples, and the token ids of the text with the end token
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import UserError

from .batches import IGNORE, Batch, pad_rows
from .mel import HOP, SAMPLE_RATE, log_mel
from .prepare import PreparedDataset, _cache_key, _encode, _is_done, _write_atomically
from .read import CorpusSplit, Tick, no_progress
from .sound import read_sound
from .tokenizer import Tokenizer

CHUNK = 64  # recordings in a record batch of the file
INT16_SCALE = 2**15
SCHEMA = pa.schema([("source", pa.list_(pa.int16())), ("target", pa.list_(pa.int32()))])


def folder_of(lines: CorpusSplit) -> Path:
    """Return the folder of the table that names the recordings, to which their paths are relative."""
    first = lines.records.files[0]
    return Path(getattr(first, "path", None) or first.paths[0]).parent  # type: ignore[attr-defined]


def prepare_sounds(
    lines: CorpusSplit,
    tokenizer: Tokenizer,
    path: Path,
    limits: tuple[int, int],
    skip: bool = False,
    tick: Tick = no_progress,
) -> PreparedDataset:
    """Write the samples and tokens of recordings to `path`, unless they are there already.

    lines:  pairs of a file and its text.
    limits: the most samples and tokens; longer examples are left out.
    skip:   leave out recordings that cannot be read, instead of refusing them.
    """
    root = folder_of(lines)
    key = _cache_key(lines, [tokenizer], limits, ["sounds", skip, _stamps(lines, root)])
    if not _is_done(path, key):
        with _write_atomically(path, key) as (part, note):
            note["left_out"] = done = 0
            with pa.OSFile(str(part), "wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
                rows = iter(lines)
                while some := list(islice(rows, CHUNK)):
                    sounds, texts = _read(some, root, lines.name, skip), _encode(tokenizer, [text for _, text in some])
                    every = zip(sounds, texts, strict=True)
                    kept = [pair for pair in every if 0 < len(pair[0]) <= limits[0] and len(pair[1]) <= limits[1]]
                    note["left_out"] += len(some) - len(kept)
                    if kept:
                        sounds, texts = zip(*kept, strict=True)
                        lists = [_lists(sounds, pa.int16()), _lists(texts, pa.int32())]
                        writer.write(pa.record_batch(lists, schema=SCHEMA))
                    done += len(some)
                    tick(done)
    made = PreparedDataset(path)
    if not len(made):
        raise UserError(
            f"{lines.name}: none of the {made.left_out} recordings is at most {limits[0] / SAMPLE_RATE:g} s long, with "
            f"a text of at most {limits[1]} tokens, and can be read"
        )
    return made


def _stamps(lines: CorpusSplit, root: Path) -> str:
    """Return a hash of the names, sizes and times of the recordings."""
    digest = hashlib.sha256()
    for file, *_ in lines:
        status = (root / file).stat() if (root / file).is_file() else None
        digest.update(repr((file, status and (status.st_size, status.st_mtime_ns))).encode())
    return digest.hexdigest()


def _read(rows: Sequence[tuple[str, ...]], root: Path, name: str, skip: bool) -> list[np.ndarray]:
    """Return the samples of each recording; none for one that cannot be read."""
    found = []
    for file, *_ in rows:
        try:
            found.append(to_int16(read_sound(root / file)))
        except UserError as error:
            if not skip:
                raise UserError(f"{name}: {error}") from None
            found.append(np.zeros(0, np.int16))
    return found


def to_int16(sound: Tensor) -> np.ndarray:
    """Return samples between -1 and 1 as 16-bit integers."""
    return (sound * INT16_SCALE).round().clamp(-INT16_SCALE, INT16_SCALE - 1).short().numpy()


def _lists(rows: Sequence, kind: pa.DataType) -> pa.ListArray:
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    values = np.concatenate([np.asarray(row) for row in rows])
    return pa.ListArray.from_arrays(offsets, pa.array(values, kind))


def to_log_mel(sounds: Sequence[np.ndarray], frames: int, bands: int) -> Tensor:
    """Return the log-mel frames of recordings, (recordings, frames, bands), padded with silence."""
    samples = [torch.from_numpy(np.array(sound)).float() / INT16_SCALE for sound in sounds]
    return torch.stack([log_mel(F.pad(one, (0, frames * HOP - len(one))), bands) for one in samples])


def teacher_forced_after(texts: Sequence[Sequence[int]], before: Sequence[int], pad: int) -> Batch:
    """Return token ids that end in the end token as a batch for teacher forcing, after the prefix `before`."""
    target, valid = pad_rows([np.array([*before, *ids]) for ids in texts], pad)
    tokens, targets, valid = target[:, :-1], target[:, 1:], valid[:, 1:]
    targets = targets.where(valid & (torch.arange(targets.shape[1]) >= len(before) - 1), IGNORE)
    count = int((targets != IGNORE).sum())
    return Batch(tokens, targets, None if bool(valid.all()) else valid, count=count)


class RecordingBatches:
    """Batches of `count` recordings with their texts, in a new order in every epoch.

    window: the frames and mel bands of each recording.
    before: the token ids that precede every text.
    """

    def __init__(
        self, data: PreparedDataset, count: int, seed: int, window: tuple[int, int], before: Sequence[int], pad: int,
        shuffle: bool = True,
    ):  # fmt: skip
        self.data, self.count, self.seed, self.shuffle = data, max(count, 1), seed, shuffle
        self.window, self.before, self.pad = window, before, pad

    def epoch(self, number: int) -> list[np.ndarray]:
        order = np.arange(len(self.data))
        if self.shuffle:
            np.random.default_rng((self.seed, number)).shuffle(order)
        return [order[begin : begin + self.count] for begin in range(0, len(order), self.count)]

    def make(self, numbers: np.ndarray) -> Batch:
        sounds, texts = zip(*(self.data[int(number)] for number in numbers), strict=True)
        return teacher_forced_after(texts, self.before, self.pad)._replace(source=to_log_mel(sounds, *self.window))
