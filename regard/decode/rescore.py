"""Rank the answers of a decoder that writes all tokens at once by a judge, an autoregressive model with its tokens.

    score(y) = log p_judge(y) / |y|^length_penalty        |y| counts the end token

The judge reads all candidates at once, as in training: noisy parallel decoding. Gu et al. 2018, arXiv:1711.02281.
"""

from __future__ import annotations

import torch

from regard.core import Memory, Model, select
from regard.data.batches import pad_rows

from .result import Hypothesis, at_least_float32

MAX_LOGITS = 1 << 25  # computed at a time


@torch.no_grad()
def rescore(
    judge: Model, memory: Memory, answers: list[list[Hypothesis]], prefix: list[int], end: int, length_penalty: float
) -> list[list[Hypothesis]]:
    """Return the answers of every row with the judge's scores, best first.

    memory: the judge's, of the same sources.
    prefix: what the judge's answers begin with: the start token, and perhaps a forced one.
    """
    rows = [row for row, some in enumerate(answers) for _ in some]
    given = [one for some in answers for one in some]
    longest = max((len(one.tokens) for one in given), default=0) + len(prefix)
    size = max(MAX_LOGITS // (longest * judge.vocab), 1)
    logs: list[float] = []
    for begin in range(0, len(given), size):
        some = [one.tokens for one in given[begin : begin + size]]
        at = torch.tensor(rows[begin : begin + size], device=memory.x.device)
        logs += _logprobs(judge, select(memory, at), some, prefix, end)
    judged = iter(
        one._replace(logprob=log, score=log / (len(one.tokens) + 1) ** length_penalty)
        for one, log in zip(given, logs, strict=True)
    )
    found = [[next(judged) for _ in some] for some in answers]
    return [sorted(some, key=lambda one: -one.score) for some in found]


def _logprobs(judge: Model, memory: Memory, answers: list[list[int]], prefix: list[int], end: int) -> list[float]:
    """Return the log-probability of each answer and its end."""
    device, skipped = memory.x.device, len(prefix) - 1
    tokens, valid = pad_rows([[*prefix, *one] for one in answers], end)
    targets, _ = pad_rows([[*prefix[1:], *one, end] for one in answers], end)
    logits = judge(tokens.to(device), valid.to(device), memory=memory)
    logs = at_least_float32(logits).log_softmax(-1).gather(2, targets.to(device)[..., None])[..., 0]
    return logs.masked_fill(~valid.to(device), 0.0)[:, skipped:].sum(1).tolist()
