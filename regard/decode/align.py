"""Where a decoder looked in its source while it said each token, from the taps `weights` of whatever mixers it has."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.core import Memory, Model, UserError, watch

TAPS = "*stack*weights"  # of the decoder, or of the decoders of several models


@torch.no_grad()
def looks(model: Model, tokens: Tensor, valid: Tensor | None, memory: Memory) -> Tensor:
    """tokens (batch, time), the start mark first, what was said after it -> (batch, time, source): the mean over heads
    and layers of all weights that cross over to the source. Row i is where it looked to say token i + 1."""
    names = crossing(model)
    with watch(model, TAPS) as seen:
        model(tokens, valid, memory=memory)
    return torch.stack([weights.mean(1) for name in names for weights in seen[name]]).mean(0)


def crossing(model: Model) -> list[str]:
    """The decoder's taps that see weights over the source and not over itself: found by trying sizes that differ."""
    tokens, source = (torch.zeros(1, n, dtype=torch.long, device=_device(model)) for n in (2, 3))
    with watch(model, TAPS) as seen:
        model(tokens, source=source)
    names = [name for name, weights in seen.items() if weights[0].dim() == 4 and weights[0].shape[2:] == (2, 3)]
    if not names:
        raise UserError("this model's decoder does not look at single places of its source, so nothing is aligned")
    return names


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
