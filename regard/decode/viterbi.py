"""The most probable sequence of a CRF over the canvas. Sun et al. 2019, arXiv:1910.11555."""

from __future__ import annotations

from collections.abc import Iterator

from regard.core import Model

from .canvas import Canvas, Marks, hidden
from .config import DecodeConfig


def viterbi(model: Model, canvas: Canvas, marks: Marks, config: DecodeConfig) -> Iterator[Canvas]:
    tokens, logprobs = model.head.best(*hidden(model, canvas))  # type: ignore[operator]
    yield canvas._replace(tokens=tokens, logprobs=logprobs)
