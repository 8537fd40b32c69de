"""Audio input: two convolutions over the frames of a spectrogram, the second of stride 2, plus sinusoidal positions.

    h_t = gelu(W_1 [f_(t-1), f_t, f_(t+1)] + b_1)         x_n = gelu(W_2 [h_(2n-1), h_2n, h_(2n+1)] + b_2) + p(n)

Radford et al. 2022, "Robust Speech Recognition via Large-Scale Weak Supervision" (Whisper), arXiv:2212.04356.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Context, Embed, Norm, Position, UserError, part

RECEPTIVE_FIELD = 5  # frames that a position depends on: 2n - 2 to 2n + 2


class Frames(Embed):
    """Takes frames (batch, 2 time, channels), or the windows that `cut` makes of them (batch, time, 5, channels).

    channels: channels of a frame, such as mel bands.
    length:   maximum number of positions, which is half the number of frames.
    position: position added to the vectors; None: a table of sines, then cosines, that is stored but not trained.
    norm:     norm after that.
    """

    reads = "sounds"
    examples = ({"channels": 5, "length": 29}, {"channels": 3, "position": "sinusoidal", "norm": "layer"})

    def __init__(
        self,
        width: int,
        channels: int = 80,
        length: int = 1500,
        position: Position | str | dict | None = None,
        norm: Norm | str | dict = "none",
        dropout: float = 0.0,
    ):
        if channels < 1:
            raise UserError(f"channels must be at least 1, not {channels}")
        super().__init__(width, {"part": "learned", "length": length} if position is None else position, norm, dropout)
        self.channels = channels
        self.first, self.second = nn.Conv1d(channels, width, 3), nn.Conv1d(width, width, 3, stride=2)
        if position is None:
            sinusoids = part(Position, {"part": "sinusoidal", "layout": "halves", "spread": "ends"}, width=width)
            table = self.position.table
            with torch.no_grad():
                table.copy_(sinusoids.embed(torch.zeros_like(table), torch.arange(length, device=table.device)))
            table.requires_grad_(False)

    def extent(self, tokens: Tensor) -> tuple[int, int]:
        if tokens.dim() == 4:
            return tokens.shape[0], tokens.shape[1]
        if tokens.dim() != 3 or tokens.shape[-1] != self.channels or tokens.shape[1] % 2:
            raise UserError(
                f"audio is an even number of frames, (batch, 2 time, {self.channels}), not {tuple(tokens.shape)}"
            )
        return tokens.shape[0], tokens.shape[1] // 2

    def cut(self, frames: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the frames that each position depends on, zero-padded: (batch, 2 time, channels) -> (batch, time, 5,
        channels)."""
        if valid is not None:
            frames = frames.masked_fill(~valid.repeat_interleave(2, 1)[..., None], 0.0)
        return F.pad(frames, (0, 0, 2, 1)).unfold(1, RECEPTIVE_FIELD, 2).transpose(2, 3)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        self.extent(tokens)
        if not tokens.is_floating_point() or (
            tokens.dim() == 4 and tokens.shape[2:] != (RECEPTIVE_FIELD, self.channels)
        ):
            raise UserError(f"the frames must be numbers in {self.channels} channels, not {tokens.dtype}")
        windows = self.cut(tokens, context.valid) if tokens.dim() == 3 else tokens
        near = windows.to(self.first.weight.dtype).unfold(2, 3, 1).flatten(-2)  # (batch, time, 3, channels * 3)
        x = F.gelu(F.linear(near, self.first.weight.flatten(1), self.first.bias))
        before = (context.positions == 0)[..., None] & (torch.arange(3, device=x.device) == 0)
        x = x.masked_fill(before[..., None], 0.0).mT.flatten(-2)  # the second convolution is zero-padded
        return self.add_position(F.gelu(F.linear(x, self.second.weight.flatten(1), self.second.bias)), context)

    def random_input(self, batch: int, time: int) -> Tensor:
        return self.cut(torch.randn(batch, 2 * time, self.channels, dtype=self.first.weight.dtype))

    def flops(self, length: int) -> int:
        return 2 * length * (3 * self.first.weight.numel() + self.second.weight.numel())
