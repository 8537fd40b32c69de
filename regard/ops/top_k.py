"""The few largest of many numbers. To sort a part of a long row is slow on a CPU; one pass over it is not."""

from __future__ import annotations

import torch
from torch import Tensor

COLUMNS = 128
LONG = 4096  # from which on it pays


def top(scores: Tensor, many: int) -> tuple[Tensor, Tensor]:
    """Of scores (rows, n), the `many` largest of each row, largest first, and where they stand: (rows, many) each.

    Rows are laid out in columns: the largest numbers stand in those columns whose own largest are the largest."""
    n = scores.shape[1]
    if scores.device.type != "cpu" or n < LONG or many > COLUMNS // 4:
        return torch.topk(scores, many, -1)
    lines = n // COLUMNS
    table = scores[:, : lines * COLUMNS].unflatten(1, (lines, COLUMNS))
    best = table.amax(1).topk(many, -1, sorted=False).indices
    near = table.gather(2, best[:, None].expand(-1, lines, -1)).flatten(1)
    found, at = torch.cat((near, scores[:, lines * COLUMNS :]), 1).topk(many, -1)
    inside = at // many * COLUMNS + best.gather(1, at % many)
    return found, torch.where(at < near.shape[1], inside, at + lines * (COLUMNS - many))
