"""An alignment: every position says its most probable token or the blank; repeats are joined and blanks dropped. With a
beam, the alignments of an answer are added up. The padding token is the blank.

Libovicky and Helcl 2018, arXiv:1811.04719; prefix beam search: Hannun et al. 2014, arXiv:1408.2873.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from regard.core import Model
from regard.data.batches import pad_rows
from regard.ops.ctc import beam_search, collapse

from .canvas import Canvas, Marks, log_probs
from .config import DecodeConfig


def ctc(model: Model, canvas: Canvas, marks: Marks, config: DecodeConfig) -> Iterator[Canvas]:
    logs = log_probs(model, canvas)
    best, tokens = logs.max(-1)
    logprobs = best.masked_fill(~canvas.valid, 0.0).sum(1)
    yield canvas._replace(tokens=tokens, logprobs=logprobs)
    if config.beam == 1:
        joined, counts = collapse(tokens, marks.pad, canvas.valid)
    else:
        found = [beam_search(row[:n], marks.pad, config.beam)[0] for row, n in zip(logs, canvas.lengths, strict=True)]
        joined, _ = pad_rows([list(tokens) for tokens, _ in found], marks.pad)
        joined, counts = joined.to(tokens.device), torch.tensor([len(one) for one, _ in found], device=tokens.device)
        logprobs = torch.tensor([log for _, log in found], device=tokens.device)
    columns = torch.arange(joined.shape[1], device=tokens.device)
    yield canvas._replace(tokens=joined, valid=columns < counts[:, None], logprobs=logprobs)
