"""Cross-attention weights of a decoder for each token that it generated, from the `weights` taps of its mixers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.core import Memory, Model, UserError, watch

TAPS = "*stack*weights"  # of the decoder, or of the decoders of several models


@torch.no_grad()
def cross_attention(model: Model, tokens: Tensor, valid: Tensor | None, memory: Memory) -> Tensor:
    """tokens (batch, time), beginning with the start token -> (batch, time, source): the mean of the cross-attention
    weights over heads and layers. Row i holds the weights with which token i + 1 was generated."""
    names = cross_attention_taps(model)
    with watch(model, TAPS) as seen:
        model(tokens, valid, memory=memory)
    return torch.stack([weights.mean(1) for name in names for weights in seen[name]]).mean(0)


def cross_attention_taps(model: Model) -> list[str]:
    """Return the names of the decoder's taps with weights over the source, found by a call with different sizes."""
    tokens, source = (torch.zeros(1, n, dtype=torch.long, device=_device(model)) for n in (2, 3))
    with watch(model, TAPS) as seen:
        model(tokens, source=source)
    names = [name for name, weights in seen.items() if weights[0].dim() == 4 and weights[0].shape[2:] == (2, 3)]
    if not names:
        raise UserError("this model's decoder has no attention over single source positions, so there is no alignment")
    return names


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
