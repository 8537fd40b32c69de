"""Writing into a state that has a place for every position."""

import torch
from torch import Tensor


def write(cache: Tensor, slot: Tensor, new: Tensor) -> Tensor:
    """cache[row, slot[row, i]] = new[row, i]: in place, unless a gradient has to find its way back."""
    rows = torch.arange(cache.shape[0], device=cache.device)[:, None]
    if torch.is_grad_enabled() and (new.requires_grad or cache.requires_grad):
        return cache.index_put((rows, slot), new.to(cache.dtype))
    return cache.index_put_((rows, slot), new.to(cache.dtype))
