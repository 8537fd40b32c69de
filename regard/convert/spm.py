"""The pieces of a SentencePiece model: the file is a protocol buffer, of which only these few fields are read.

Kudo & Richardson 2018, "SentencePiece", arXiv:1808.06226.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from regard.core import UserError
from regard.errors import short

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # kinds of piece


class Piece(NamedTuple):
    text: str
    score: float
    kind: int


class Pieces(NamedTuple):
    pieces: list[Piece]
    unigram: bool  # else byte-pair encoding
    charsmap: bytes  # how characters are normalised


def read(path: Path) -> Pieces:
    try:
        data = path.read_bytes()
        pieces, unigram, charsmap = [], True, b""
        for number, value in _fields(data):
            if number == 1:
                inside = dict(_fields(value))
                score = struct.unpack("<f", inside.get(2, bytes(4)))[0]
                pieces.append(Piece(inside[1].decode(), score, int(inside.get(3, NORMAL))))
            elif number == 2:
                unigram = dict(_fields(value)).get(3, 1) == 1
            elif number == 3:
                charsmap = dict(_fields(value)).get(2, b"")
    except OSError as error:
        raise UserError(f"{short(path)} cannot be read: {error.strerror}") from None
    except (IndexError, KeyError, ValueError, TypeError, AttributeError, struct.error):
        raise UserError(f"{short(path)} is no SentencePiece model") from None
    if not pieces:
        raise UserError(f"{short(path)} is no SentencePiece model: it holds no pieces")
    return Pieces(pieces, unigram, charsmap)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:  # type: ignore[misc]
    """Number and value of each field of a message; of a kind that has a length, the bytes themselves."""
    at = 0
    while at < len(data):
        tag, at = _number(data, at)
        kind = tag & 7
        if kind == 0:
            value: int | bytes
            value, at = _number(data, at)
        elif kind == 2:
            length, at = _number(data, at)
            if at + length > len(data):
                raise ValueError("a field is longer than the file")
            value, at = data[at : at + length], at + length
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
            value, at = data[at : at + length], at + length
        else:
            raise ValueError("a kind of field that nobody writes any more")
        yield tag >> 3, value


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Seven bits a byte, the lowest first."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
