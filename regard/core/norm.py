"""The contract of normalisation."""

from typing import Any, ClassVar

from torch import Tensor, nn


class Norm(nn.Module):
    """x (batch, time, width) -> the same shape. Statistics over positions use the real ones only."""

    folder: ClassVar[tuple[str, ...]] = ("norms",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        raise NotImplementedError
