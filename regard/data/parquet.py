"""Stream the rows of some columns of a Parquet file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from regard.core import UserError
from regard.errors import in_one_line, short

from .columns import BadRow, ColumnSelector
from .forms import NumberedRow, check_contents, file_stamp, open_bytes

ROWS = 4096  # read at a time
GROWTH = 100  # a gzipped file may be this many times larger when decompressed
BLOCK = 1 << 20


class Parquet:
    """A Parquet file of which some columns are wanted. columns, wanted, max_chars: as in Table."""

    unit, documents = "row", True

    def __init__(self, path: Path, columns: tuple[str, ...], wanted: int, max_chars: int):
        self.path, self.name = path, short(path)
        check_contents(path, "parquet")
        with self._file() as file:
            names = dict.fromkeys(file.schema_arrow.names)
        try:
            self.pick = ColumnSelector(names, False, columns, wanted, max_chars)
        except UserError as error:
            raise error.of(self.name) from None

    def rows(self) -> Iterator[NumberedRow]:
        number, top_level_names = 0, self.pick.top_level_names
        with self._file() as file:
            for batch in file.iter_batches(batch_size=ROWS, columns=top_level_names, use_threads=False):
                for values in zip(*(_values(batch.column(name)) for name in top_level_names), strict=True):
                    number += 1
                    yield number, self.pick(dict(zip(top_level_names, values, strict=True)))

    @contextmanager
    def _file(self) -> Iterator[pq.ParquetFile]:
        try:
            with tempfile.TemporaryFile() as unzipped:
                if self.path.suffix.lower() == ".gz":  # Parquet is read from its end, which a gzip stream cannot do
                    with open_bytes(self.path) as file:
                        self._unzip(file, unzipped)
                yield pq.ParquetFile(unzipped if unzipped.tell() else self.path, memory_map=True)
        except UserError:
            raise
        except (pa.ArrowException, OSError, MemoryError, ValueError, KeyError) as error:
            raise UserError(f"{self.name} is damaged, or no Parquet: {in_one_line(error)}") from None

    def _unzip(self, file: IO[bytes], unzipped: IO[bytes]) -> None:
        """Decompress into a temporary file, unless it grows more than Parquet, which is compressed already, ever
        would."""
        most = max(GROWTH * self.path.stat().st_size, BLOCK)
        while block := file.read(BLOCK):
            if unzipped.tell() + len(block) > most:
                raise UserError(f"{self.name} becomes more than {GROWTH} times larger unzipped, and is no Parquet file")
            unzipped.write(block)

    def key(self) -> list[Any]:
        return [file_stamp(self.path), self.pick.wanted]


def _values(column: pa.Array) -> list[Any]:
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_value(cell) for cell in column]


def _value(cell: pa.Scalar) -> Any:
    try:
        return cell.as_py()
    except UnicodeDecodeError:
        return BadRow("not UTF-8", "is not UTF-8")
