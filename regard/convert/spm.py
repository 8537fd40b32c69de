"""Read the pieces of a SentencePiece model, a protocol buffer of which only a few fields are needed.

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
    charsmap: bytes  # the precompiled normalization of characters


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
    """Yield number and value of each field of a message; a field with a length yields its bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value: int | bytes
            value, at = _varint(data, at)
        elif kind == 2:
            length, at = _varint(data, at)
            if at + length > len(data):
                raise ValueError("a field is longer than the file")
            value, at = data[at : at + length], at + length
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
            value, at = data[at : at + length], at + length
        else:
            raise ValueError("a deprecated kind of field")
        yield tag >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a variable-length integer (seven bits per byte, the lowest first) and the position after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
