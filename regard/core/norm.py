"""The contract of normalisation."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .fusion import FusedNorm


class Norm(nn.Module):
    """x (batch, time, width) -> the same shape. Statistics over positions use the real ones only, and in eval mode
    those gathered in training, so that no position looks at another."""

    folder: ClassVar[tuple[str, ...]] = ("norms",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    idle: bool = False  # it hands on what it gets

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def fused(self) -> FusedNorm | None:
        """Return what it does to each vector alone, for a kernel; None: it does something else."""
        return None


def real(x: Tensor, valid: Tensor | None) -> Tensor:
    """x (batch, time, width) with zeros where a position is not real."""
    return x if valid is None else torch.where(valid[..., None], x, 0.0)


def count(x: Tensor, valid: Tensor | None) -> Tensor:
    """How many positions are real, at least 1, as a number to divide by."""
    positions = torch.tensor(x[..., 0].numel(), device=x.device) if valid is None else valid.sum()
    return positions.clamp(min=1).to(torch.float64 if x.dtype == torch.float64 else torch.float32)
