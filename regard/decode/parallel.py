"""One pass: every position says its most probable token. Gu et al. 2018, arXiv:1711.02281."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from regard.core import BLANK, Model

from .canvas import Canvas, Marks, log_probs
from .config import DecodeConfig


def parallel(model: Model, canvas: Canvas, marks: Marks, config: DecodeConfig) -> Iterator[Canvas]:
    best, tokens = log_probs(model, canvas).max(-1)
    written = canvas.valid & (canvas.tokens == BLANK)
    yield canvas._replace(
        tokens=torch.where(written, tokens, canvas.tokens), logprobs=best.masked_fill(~written, 0.0).sum(1)
    )
