"""Log-mel spectrograms, with the parameters of Whisper.

    frame t    samples 160 t - 200 to 160 t + 199 under a Hann window: 25 ms, every 10 ms
    energy     e_b = sum over f of  filter_b(f) |Fourier(frame)_f|^2          80 or 128 bands
    value      x = log10(max(e, 1e-10));  x = (max(x, max over all - 8) + 4) / 4

Radford et al. 2022, arXiv:2212.04356. The mel scale: Slaney 1998, Auditory Toolbox, with triangles
of area 1 in Hz.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import UserError

SAMPLE_RATE = 16_000  # samples per second
WINDOW, HOP = 400, 160
CHUNK = 3000  # frames that are computed at a time
KINK, STEP, GROWTH = 1000.0, 200 / 3, math.log(6.4) / 27  # Slaney: even steps up to 1 kHz, even ratios above


def log_mel(samples: Tensor, bands: int = 80) -> Tensor:
    """Return the log-mel frames, (n // 160, bands), of samples (n,) at 16 kHz."""
    if samples.dim() != 1 or not samples.is_floating_point():
        raise UserError(f"sound is one row of numbers between -1 and 1, not {samples.dtype} {tuple(samples.shape)}")
    count = len(samples) // HOP
    if not count:
        raise UserError(f"a sound of {len(samples)} samples is shorter than a frame, which takes {HOP}")
    half = WINDOW // 2
    how = "reflect" if len(samples) > half else "constant"
    padded = F.pad(samples.float()[None], (half, half), mode=how)[0]
    window = torch.hann_window(WINDOW, device=samples.device)
    bank = mel_filters(bands).to(samples.device)
    found = []
    for begin in range(0, count, CHUNK):
        end = min(begin + CHUNK, count)
        some = padded[begin * HOP : (end - 1) * HOP + WINDOW].unfold(0, WINDOW, HOP) * window  # (frames, 400)
        energy = torch.fft.rfft(some).abs().square() @ bank.T
        found.append(energy.clamp(min=1e-10).log10())
    logs = torch.cat(found)
    return (torch.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0


@lru_cache(maxsize=4)
def mel_filters(bands: int) -> Tensor:
    """Return the weight of each frequency in each band, (bands, 201)."""
    if bands < 1:
        raise UserError(f"sound needs at least one mel band, not {bands}")
    frequencies = torch.linspace(0, SAMPLE_RATE / 2, WINDOW // 2 + 1, dtype=torch.float64)
    edges = _hertz(torch.linspace(0, _mel(SAMPLE_RATE / 2), bands + 2, dtype=torch.float64))
    left, middle, right = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    up, down = (frequencies - left) / (middle - left), (right - frequencies) / (right - middle)
    return (torch.minimum(up, down).clamp(min=0) * 2 / (right - left)).float()


def _mel(hertz: float) -> float:
    return hertz / STEP if hertz < KINK else KINK / STEP + math.log(hertz / KINK) / GROWTH


def _hertz(mel: Tensor) -> Tensor:
    return torch.where(mel < KINK / STEP, mel * STEP, KINK * torch.exp(GROWTH * (mel - KINK / STEP)))
