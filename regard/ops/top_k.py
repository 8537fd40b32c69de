"""Top-k of long rows, faster than torch.topk on a CPU: one pass over the row, then topk over few candidates."""

from __future__ import annotations

import torch
from torch import Tensor

COLUMNS = 128
MIN_LENGTH = 4096  # of a row, from which this is faster than torch.topk


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest scores (rows, n) of each row, largest first, and their indices, (rows, k) each.

    Each row is laid out as a table; the k largest scores are in the k columns with the largest maxima."""
    n = scores.shape[1]
    if scores.device.type != "cpu" or n < MIN_LENGTH or k > COLUMNS // 4:
        return torch.topk(scores, k, -1)
    rows = n // COLUMNS
    table = scores[:, : rows * COLUMNS].unflatten(1, (rows, COLUMNS))
    best = table.amax(1).topk(k, -1, sorted=False).indices
    near = table.gather(2, best[:, None].expand(-1, rows, -1)).flatten(1)
    found, at = torch.cat((near, scores[:, rows * COLUMNS :]), 1).topk(k, -1)
    inside = at // k * COLUMNS + best.gather(1, at % k)
    return found, torch.where(at < near.shape[1], inside, at + rows * (COLUMNS - k))
