"""The contract of norms."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .fusion import FusedNorm


class Norm(nn.Module):
    """x (batch, time, width) -> the same shape. Statistics over positions use real positions only, and in eval
    mode the running ones of training, so that no position depends on another."""

    folder: ClassVar[tuple[str, ...]] = ("norms",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    is_identity: bool = False  # its output is its input

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def fused(self) -> FusedNorm | None:
        """Return a description of the norm for a kernel, where it treats every vector alone; None where it does not."""
        return None


def zero_padding(x: Tensor, valid: Tensor | None) -> Tensor:
    """Return x (batch, time, width) with zeros where a position is not real."""
    return x if valid is None else torch.where(valid[..., None], x, 0.0)


def count_valid(x: Tensor, valid: Tensor | None) -> Tensor:
    """Return the number of real positions, at least 1, as a float to divide by."""
    positions = torch.tensor(x[..., 0].numel(), device=x.device) if valid is None else valid.sum()
    return positions.clamp(min=1).to(torch.float64 if x.dtype == torch.float64 else torch.float32)
