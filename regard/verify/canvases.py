"""The law of decoders that write all tokens at once: an answer is the same alone, in any batch, in any order and with
any padding, for every strategy by which the model can be decoded."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from regard.core import Model
from regard.decode import DecodeConfig
from regard.decode.canvas import Marks, strategies_of, write
from regard.decode.result import Hypothesis

from .laws import Finding, Subject

LENGTHS = (5, 9, 1, 7, 2)
MARKS = Marks(0, 1, 2)
LIMIT = 1e-5  # of log-probabilities, which are given in float32

Answers = list[list[Hypothesis]]


def batches(subject: Subject) -> Finding:
    """Compare the answers to some sources in one batch with those alone, in another order and with more padding."""
    model = copy.deepcopy(subject.module)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)  # so that the answers differ
    worst, where, names = 0.0, "", strategies_of(model)  # type: ignore[arg-type]
    for name in names:
        gap = _gap(model, DecodeConfig(strategy=name, iterations=4, length_beam=3))  # type: ignore[arg-type]
        if gap > worst:
            worst, where = gap, f", the worst: {name}"
    return Finding("batches", worst, LIMIT, f"answers by {', '.join(names)}{where if worst > LIMIT else ''}")


def _gap(model: Model, config: DecodeConfig) -> float:
    """Return the largest difference of log-probabilities; infinity where the tokens of an answer differ."""
    embed = model.source_embed
    assert embed is not None
    source = embed.random_input(len(LENGTHS), max(LENGTHS))
    valid = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    together = _answers(model, source, valid, config)
    alone = [_answers(model, source[row : row + 1, :length], None, config)[0] for row, length in enumerate(LENGTHS)]
    order = torch.tensor([3, 0, 4, 2, 1])
    reordered: Answers = [[] for _ in LENGTHS]
    for row, found in zip(order.tolist(), _answers(model, source[order], valid[order], config), strict=True):
        reordered[row] = found
    wider = torch.cat((source, embed.random_input(len(source), 6)), 1)
    padded = _answers(model, wider, torch.cat((valid, torch.zeros(len(source), 6, dtype=torch.bool)), 1), config)
    return max(_difference(found, together) for found in (alone, reordered, padded))


@torch.no_grad()
def _answers(model: Model, source: Tensor, valid: Tensor | None, config: DecodeConfig) -> Answers:
    return write(model, model.encode(source, valid), MARKS, config)


def _difference(found: Answers, wanted: Answers) -> float:
    if [[one.tokens for one in row] for row in found] != [[one.tokens for one in row] for row in wanted]:
        return float("inf")
    pairs = [pair for rows in zip(found, wanted, strict=True) for pair in zip(*rows, strict=True)]
    return max(abs(one.logprob - other.logprob) / max(abs(other.logprob), 1.0) for one, other in pairs)
