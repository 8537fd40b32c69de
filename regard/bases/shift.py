"""Token shift: every position gets its own vector and the previous one, mixed channel by channel.

    x'_t = mix * x_t + (1 - mix) * x_(t-1)                 x_0 = 0

Peng et al. 2023, "RWKV: Reinventing RNNs for the Transformer Era", arXiv:2305.13048.
"""

import torch
from torch import Tensor, nn

from regard.core import Context


def shifted(first: Tensor, all_: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """Return the previous value at every column (batch, time, ...), and the last real one of each row (batch, ...)."""
    joined = torch.cat((first[:, None], all_), 1)  # (batch, time + 1, ...)
    if context.valid is None:
        return joined[:, :-1], joined[:, -1]
    rows = torch.arange(joined.shape[0], device=joined.device)
    return joined[:, :-1], joined[rows, context.lengths]


def shift(x: Tensor, last: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """x (batch, time, width) after `last` (batch, width) -> the vectors before each, and the last real one of each
    row."""
    return shifted(last, x, context)


def mixed(x: Tensor, before: Tensor, mix: Tensor) -> Tensor:
    return torch.lerp(before, x, mix.to(x.dtype))


def filled_parameter(values: Tensor) -> nn.Parameter:
    """Return a parameter with these values; allocated empty and then filled, so that models can be built on meta."""
    parameter = nn.Parameter(torch.empty(values.shape))
    with torch.no_grad():
        parameter.copy_(values)
    return parameter
