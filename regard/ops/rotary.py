"""Angles that grow with the position, and pairs of channels rotated by them."""

from functools import lru_cache

import torch
from torch import Tensor

from regard.errors import UserError


@lru_cache(maxsize=1024)
def constant(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Return a tensor (numbers,) on a device, in float64 where the device has it. Unlike a buffer, it is not cast with
    the model."""
    with torch.inference_mode(False):  # it is cached and may be used in training
        dtype = torch.float32 if device.type == "mps" else torch.float64
        return torch.tensor(numbers, dtype=dtype, device=device)


def frequencies(dim: int, base: float) -> tuple[float, ...]:
    """Return the rotation of each pair of channels in radians per position: base^(-2i/dim)."""
    if base <= 1:
        raise UserError(f"base must be above 1, not {base}")
    return tuple(base ** (-2 * i / dim) for i in range(dim // 2))


def angles(at: Tensor, rates: tuple[float, ...]) -> Tensor:
    """Return angles (..., rates) for positions (...), in float64, so that large positions stay exact."""
    return at[..., None] * constant(rates, at.device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """Rotate each pair of channels of x (..., dim) by an angle (..., dim/2). Pairs are neighbors with "interleaved",
    and i with i + dim/2 with "halves"."""
    if layout == "halves":
        one, two = x.chunk(2, -1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)
    one, two = x[..., 0::2], x[..., 1::2]
    return torch.stack((one * cos - two * sin, two * cos + one * sin), -1).flatten(-2)
