"""The input of a decoder that writes all tokens at once: token vectors, and something else where there is no token yet.

    blank position t of T, source of S tokens with vectors e_s (without positions):
    none       a learned vector
    uniform    e_s with s = round(t (S - 1) / (T - 1))
    soft       sum over s of w_s e_s with w = softmax over s of -|s - t (S - 1) / (T - 1)| / temperature
    attention  the same with w = softmax over s of (W p_t) . (e_s + p_s), where p are the positions
    fertility  e_1 so many times as its fertility says, then e_2, ...

Gu et al. 2018, arXiv:1711.02281. Soft copies: Wei et al. 2019, arXiv:1906.02041. By attention: the code of Qian et al.
2021, arXiv:2008.07905.
"""

import math

import torch
from torch import Tensor, nn

from regard.core import BLANK, Context, Embed, Memory, Norm, Position, UserError, source_lengths
from regard.core.contracts import look_up, new_table

COPIES = ("none", "uniform", "soft", "attention", "fertility")


class Canvas(Embed):
    """copy:     what stands at a blank position: none, uniform, soft, attention or fertility, as above.
    temperature: of soft copies.
    scale, position, norm, dim, std: as in `tokens`.
    """

    examples = ({}, {"position": "sinusoidal", "scale": False})

    def __init__(
        self,
        width: int,
        vocab: int,
        copy: str = "none",
        temperature: float = 0.3,
        scale: bool = True,
        position: Position | str | dict = "none",
        norm: Norm | str | dict = "none",
        dropout: float = 0.0,
        dim: int | None = None,
        std: float | None = None,
    ):
        super().__init__(width, position, norm, dropout, dim)
        self.vocab, self.scale = vocab, math.sqrt(self.dim) if scale else 1.0
        self.table = new_table(vocab, self.dim, std)
        if copy not in COPIES:
            raise UserError(f"copy must be one of {', '.join(COPIES)}, not '{copy}'", ("copy",))
        if temperature <= 0:
            raise UserError(f"temperature must be above 0, not {temperature:g}", ("temperature",))
        self.copy, self.temperature, self.copies_source = copy, temperature, copy != "none"
        self.ask = nn.Linear(self.dim, self.dim, bias=False) if copy == "attention" else None
        self.blank = nn.Parameter(torch.empty(self.dim).normal_(std=self.dim**-0.5)) if copy == "none" else None

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        x, blank = self.vectors(tokens.clamp(min=0)), (tokens < 0)[..., None]
        if self.blank is not None:
            return self.add_position(torch.where(blank, self.blank * self.scale, x), context)
        if context.memory is None or not context.memory.embedded:
            raise UserError("a canvas of copies needs the source that is copied")
        return self.add_position(torch.where(blank, self._copied(context, context.memory), x), context)

    def vectors(self, tokens: Tensor) -> Tensor:
        return look_up(self.table, tokens, "tokens") * self.scale

    def random_input(self, batch: int, time: int) -> Tensor:
        return torch.randint(BLANK, self.vocab, (batch, time))

    def flops(self, length: int) -> int:
        """Return the flops; the source is assumed to be as long as the canvas."""
        weights = 2 * length * length * self.dim if self.copy in ("soft", "attention") else 0
        asked = 0 if self.ask is None else 2 * length * self.dim * (self.dim + length)
        return super().flops(length) + weights + asked

    def _copied(self, context: Context, memory: Memory) -> Tensor:
        """Return copies of the source vectors for all positions, (batch, time, dim)."""
        source = memory.embedded[0]
        time = context.positions.shape[1]
        if self.copy == "fertility":
            if memory.copies is None:
                raise UserError("copy = 'fertility' needs the length 'fertility'")
            ends = memory.copies.cumsum(1)
            at = (ends[:, None] <= context.positions[..., None]).sum(2)  # a binary search, which ONNX lacks
            return _gather(source, at.clamp(max=source.shape[1] - 1))
        size = source_lengths(memory)
        at = torch.arange(source.shape[1], device=source.device)
        real = at < size[:, None, None]
        if self.ask is not None:
            positions = self.position.embed(source.new_zeros(1, time, self.dim), context.positions[:1])
            scores = self.ask(positions) @ memory.embedded[1].mT
            return scores.masked_fill(~real, -torch.inf).softmax(-1) @ source
        canvas = torch.full_like(size, time) if context.valid is None else context.valid.sum(1)
        steps = (size.float() - 1) / (canvas.float() - 1).clamp(min=1)
        place = steps[:, None] * torch.arange(time, device=source.device)
        if self.copy == "uniform":
            return _gather(source, torch.minimum(place.round().long(), size[:, None] - 1))
        far = -(at - place[..., None]).abs() / self.temperature
        return far.masked_fill(~real, -torch.inf).softmax(-1).to(source.dtype) @ source


def _gather(source: Tensor, at: Tensor) -> Tensor:
    return source.gather(1, at[..., None].expand(-1, -1, source.shape[2]))
