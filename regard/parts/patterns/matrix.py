"""An explicit attention mask: the adjacency matrix of a graph, or a mask from elsewhere.

    allowed[query, key]        and False outside the matrix

Veličković et al. 2018, "Graph Attention Networks", arXiv:1710.10903, is attention with the adjacency as pattern.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from regard.core import Pattern, UserError
from regard.errors import in_one_line
from regard.files.reading import npy_bytes


@dataclass(frozen=True, eq=False)
class Matrix(Pattern):
    """allowed: (queries, keys), or (batch, queries, keys) for a graph per row; True or 1 where a query may attend to a
    key. In a recipe it is the path of an .npy or .safetensors file with the matrix: matrix("adjacency.npy").
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"allowed": torch.from_numpy(np.indices((41, 41)).prod(0) % 5 < 2)},
        {"allowed": torch.from_numpy(np.indices((41, 37)).prod(0) % 7 < 3).tril()},
        {"allowed": torch.from_numpy(np.stack([np.indices((41, 41)).sum(0) % m < 2 for m in (3, 5)]))},
    )
    allowed: Tensor | str

    def __post_init__(self) -> None:
        table = self.table
        if table.dim() not in (2, 3) or not table.numel():
            shape = tuple(table.shape)
            raise UserError(f"a matrix is (queries, keys) or (batch, queries, keys) and not empty, not {shape}")

    @cached_property
    def table(self) -> Tensor:
        """Return the matrix as a bool copy, which callers cannot change."""
        given = _from_file(self.allowed) if isinstance(self.allowed, str) else self.allowed
        if not isinstance(given, Tensor):
            raise UserError(f"a matrix is a tensor or the path of a file, not {given!r}")
        if given.dtype != torch.bool and not bool(((given == 0) | (given == 1)).all()):
            raise UserError("a matrix holds True and False, or 1 and 0, not other numbers")
        return given.detach().to(torch.bool, copy=True)

    @cached_property
    def causal(self) -> bool:  # type: ignore[override]
        return not bool(self.table.triu(1).any())

    @property
    def fixed(self) -> bool:
        return self.table.dim() == 2

    @property
    def rows(self) -> int:
        return 1 if self.fixed else self.table.shape[0]

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        table = self.table.to(key_at.device)
        queries, keys = table.shape[-2:]
        inside = (query_at >= 0) & (query_at < queries) & (key_at >= 0) & (key_at < keys)
        place = query_at.clamp(0, queries - 1).long(), key_at.clamp(0, keys - 1).long()
        if self.fixed:
            return table[place] & inside
        rows = torch.arange(len(table), device=table.device)[:, None, None, None]
        return table[(rows, *place)] & inside

    @cached_property
    def _last(self) -> Tensor:
        """Return the last query that attends to each key, (keys,), or -1 if none does."""
        seen = self.table if self.fixed else self.table.any(0)
        at = torch.arange(seen.shape[0], device=seen.device)[:, None]
        return torch.where(seen, at, -1).amax(0)

    def keeps(self, key_at: Tensor, now: Tensor) -> Tensor:
        last = self._last.to(key_at.device)
        wanted = last[key_at.clamp(0, len(last) - 1).long()] >= now
        return wanted & (key_at >= 0) & (key_at < len(last))

    def __eq__(self, other: object) -> bool:
        return Pattern.__eq__(self, other) and torch.equal(self.table, other.table)  # type: ignore[attr-defined]

    __hash__ = Pattern.__hash__


def _from_file(path: str) -> Tensor:
    suffix = Path(path).suffix
    if suffix not in (".npy", ".safetensors"):
        raise UserError(f"a matrix is read from an .npy or .safetensors file, not '{path}'")
    try:
        if suffix == ".npy":
            with open(path, "rb") as file:
                if npy_bytes(file) > Path(path).stat().st_size:
                    raise ValueError("its header announces more than it holds")
            tensors = [torch.from_numpy(np.load(path, allow_pickle=False))]
        else:
            tensors = list(load_file(path).values())
    except (OSError, ValueError, TypeError, EOFError, OverflowError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or in_one_line(error)
        raise UserError(f"no matrix can be read from '{path}': {why}") from None
    if len(tensors) != 1:
        raise UserError(f"'{path}' should hold one tensor, the matrix, and holds {len(tensors)}")
    return tensors[0]
