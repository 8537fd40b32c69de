"""Angles that grow with the position, and pairs of channels rotated by them."""

from functools import lru_cache

import torch
from torch import Tensor

from regard.errors import UserError


@lru_cache(maxsize=1024)
def constant(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """(numbers,) on a device, in double where the device knows it. Unlike a buffer, it survives whatever dtype a model
    is cast to."""
    with torch.inference_mode(False):  # it will be met again in training
        dtype = torch.float32 if device.type == "mps" else torch.float64
        return torch.tensor(numbers, dtype=dtype, device=device)


def speeds(dim: int, base: float) -> tuple[float, ...]:
    """How fast each pair of channels turns, in radians per place: base^(-2i/dim)."""
    if base <= 1:
        raise UserError(f"base must be above 1, not {base}")
    return tuple(base ** (-2 * i / dim) for i in range(dim // 2))


def angles(at: Tensor, rates: tuple[float, ...]) -> Tensor:
    """(..., rates) for places (...), in double: far places keep their fraction of a turn."""
    return at[..., None] * constant(rates, at.device)


def turn(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """x (..., dim) with each pair of channels turned by an angle (..., dim/2): pairs are neighbours when "interleaved",
    and i with i + dim/2 when in "halves"."""
    if layout == "halves":
        one, two = x.chunk(2, -1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)
    one, two = x[..., 0::2], x[..., 1::2]
    return torch.stack((one * cos - two * sin, two * cos + one * sin), -1).flatten(-2)
