"""Convolutions over positions, in steps or over whole sequences, for rows that may be padded."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Context


def conv_step(convolution: nn.Conv1d, x: Tensor, before: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """Convolve x (batch, time, channels), preceded by at least kernel - 1 inputs `before` -> outputs, and as many
    inputs for the next step."""
    joined = torch.cat((before, x), 1)
    reach = joined[:, before.shape[1] - convolution.kernel_size[0] + 1 :]
    y = convolution(reach.mT).mT
    if context.valid is None:
        return y, joined[:, x.shape[1] :]
    at = context.lengths[:, None] + torch.arange(before.shape[1], device=x.device)  # (batch, before)
    return y, joined.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))


def centered_conv(convolution: nn.Conv1d, x: Tensor, context: Context) -> Tensor:
    """Convolve x (batch, time, channels) centered, with zeros before, after and in columns that are not real."""
    if context.valid is not None:
        x = x.masked_fill(~context.valid[..., None], 0.0)
    reach = convolution.kernel_size[0] - 1
    return convolution(F.pad(x.mT, (reach // 2, reach - reach // 2))).mT
