"""Split one corpus into train, dev and test: by a hash of the source, so that no source is in two splits and the same
seed always gives the same splits; a running text is cut into three consecutive ranges instead, train first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from regard.core import UserError

BINS = 1 << 20
# By default, dev and test get this share each; of records no more than this number.
DEFAULT_SHARE, MAX_DEFAULT_SIZE = 0.05, 2000
PARTS = ("test", "dev", "train")  # in this order, so that a larger dev leaves test unchanged

Row = tuple[str, ...]


def hash_bin(text: str, seed: int) -> int:
    """Return the bin of a text, by its hash."""
    digest = blake2b(text.encode(), digest_size=8, salt=(seed % 2**64).to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") % BINS


@dataclass(frozen=True)
class HashRange:
    """Selects the records whose source is in a bin from `begin` to before `end`."""

    begin: int
    end: int
    seed: int

    def __call__(self, rows: Iterable[Row]) -> Iterator[Row]:
        return (row for row in rows if self.begin <= hash_bin(row[0], self.seed) < self.end)

    def key(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class TextRange:
    """Selects the lines of a running text that begin from character `begin` to before `end`."""

    begin: int
    end: int

    def __call__(self, rows: Iterable[Row]) -> Iterator[Row]:
        at = 0
        for row in rows:
            if at >= self.end:
                return
            if at >= self.begin:
                yield row
            at += len(row[0])

    def key(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Part:
    share: HashRange | TextRange
    count: int | None  # records


def by_hash(sources: Iterable[str], sizes: dict[str, float | None], seed: int) -> dict[str, Part]:
    """Split by a hash of the source. sizes: of dev and test: a count, a share below 1, 0 for none, or None for the
    default."""
    bins = np.zeros(BINS, dtype=np.int64)
    block: list[int] = []
    for source in sources:
        block.append(hash_bin(source, seed))
        if len(block) == 1 << 16:
            bins += np.bincount(block, minlength=BINS)
            block.clear()
    bins += np.bincount(np.array(block, dtype=np.int64), minlength=BINS)
    upto = bins.cumsum()
    total, begin, taken, parts = int(upto[-1]), 0, 0, {}
    for name in PARTS:
        wanted = total - taken if name == "train" else _count(sizes.get(name), total, name)
        end = BINS if name == "train" else int(np.searchsorted(upto, taken + wanted)) + 1 if wanted else begin
        count = int(upto[min(end, BINS) - 1]) - taken if end > begin else 0
        if count:
            parts[name] = Part(HashRange(begin, min(end, BINS), seed), count)
        begin, taken = max(begin, end), taken + count
    if "train" not in parts:
        raise UserError(
            f"{total} record{'s' * (total != 1)} cannot be split into train, dev and test, being too few or of too few "
            "different sources: give files or sizes for dev and test, or the columns, if the source is not the first "
            "(--columns 1,0)"
        )
    return parts


def by_position(characters: int, sizes: dict[str, float | None]) -> dict[str, Part]:
    """Split a text in order: train, then dev, then test. A size is a share below 1, or a number of characters."""
    dev = _length(sizes.get("dev"), characters, "dev")
    test = _length(sizes.get("test"), characters, "test")
    cut = characters - dev - test
    if cut < 1:
        raise UserError(
            f"a text of {characters} characters leaves nothing to train on beside dev ({dev}) and test ({test})"
        )
    stretches = {"train": (0, cut), "dev": (cut, cut + dev), "test": (cut + dev, characters)}
    return {name: Part(TextRange(*ends), None) for name, ends in stretches.items() if ends[0] < ends[1]}


def _count(size: float | None, total: int, name: str) -> int:
    if size is None:
        return min(MAX_DEFAULT_SIZE, max(round(DEFAULT_SHARE * total), 1))
    _check(size, name)
    return max(round(size * total), 1) if 0 < size < 1 else int(size)


def _length(size: float | None, characters: int, name: str) -> int:
    size = DEFAULT_SHARE if size is None else size
    _check(size, name)
    return round(size * characters) if size < 1 else int(size)


def _check(size: float, name: str) -> None:
    if not math.isfinite(size) or size < 0 or (size >= 1 and size != int(size)):
        raise UserError(f"{name} is a file, a share below 1 or a whole number of examples, not {size}")
