"""Mask-predict: write all tokens, blank the least probable ones, write them again.

    iteration t of T: of the n positions to write, the n (1 - t / T) with the lowest probabilities are blank

Ghazvininejad et al. 2019, "Mask-Predict", arXiv:1904.09324.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from regard.core import BLANK, Model

from .canvas import Canvas, Marks, log_probs
from .config import DecodeConfig


def mask_predict(model: Model, canvas: Canvas, marks: Marks, config: DecodeConfig) -> Iterator[Canvas]:
    to_write = canvas.valid & (canvas.tokens == BLANK)  # other tokens are given and stay
    lengths, logs = to_write.sum(1), torch.zeros_like(canvas.tokens, dtype=torch.float64)
    for iteration in range(config.iterations):
        blank = to_write
        if iteration:
            count = (lengths * (1 - iteration / config.iterations)).long()
            order = logs.masked_fill(~to_write, torch.inf).argsort(dim=1, stable=True).argsort(1)
            blank = order < count[:, None]
            if not bool(blank.any()):
                return
        best, tokens = log_probs(model, canvas._replace(tokens=torch.where(blank, BLANK, canvas.tokens))).max(-1)
        logs = torch.where(blank, best.double(), logs)
        total = logs.masked_fill(~canvas.valid, 0.0).sum(1)
        canvas = canvas._replace(tokens=torch.where(blank, tokens, canvas.tokens), logprobs=total.float())
        yield canvas
