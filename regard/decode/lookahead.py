"""A path through the graph of a canvas: at each position the link with the best product of its own probability and that
of the token behind it. Huang et al. 2022, arXiv:2205.07459."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from regard.core import Model
from regard.ops import dag

from .canvas import Canvas, Marks, hidden
from .config import DecodeConfig
from .result import at_least_float32


def lookahead(model: Model, canvas: Canvas, marks: Marks, config: DecodeConfig) -> Iterator[Canvas]:
    x, context = hidden(model, canvas)
    logs, links = at_least_float32(model.head(x, context)).log_softmax(-1), model.head.links(x, context)  # type: ignore
    tokens, path, logprobs = dag.greedy(logs, at_least_float32(links), canvas.lengths)
    said = canvas.tokens.scatter(1, path.clamp(min=0), tokens)  # what each position on the path says
    yield canvas._replace(tokens=torch.where(canvas.valid, said, canvas.tokens))
    valid = path >= 0
    yield canvas._replace(tokens=tokens.masked_fill(~valid, marks.pad), valid=valid, logprobs=logprobs)
