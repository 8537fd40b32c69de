"""Convolutions over positions, in steps and as a whole, where rows stand at different places and may be padded."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Context


def slide(convolution: nn.Conv1d, x: Tensor, before: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """x (batch, time, channels) after the inputs `before` it, as many as it reaches back or more -> outputs, and as
    many inputs before the next step."""
    joined = torch.cat((before, x), 1)
    reach = joined[:, before.shape[1] - convolution.kernel_size[0] + 1 :]
    y = convolution(reach.mT).mT
    if context.valid is None:
        return y, joined[:, x.shape[1] :]
    at = context.lengths[:, None] + torch.arange(before.shape[1], device=x.device)  # (batch, before)
    return y, joined.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))


def centred(convolution: nn.Conv1d, x: Tensor, context: Context) -> Tensor:
    """x (batch, time, channels): zeros stand before, after and wherever a column is not real."""
    if context.valid is not None:
        x = x.masked_fill(~context.valid[..., None], 0.0)
    reach = convolution.kernel_size[0] - 1
    return convolution(F.pad(x.mT, (reach // 2, reach - reach // 2))).mT
