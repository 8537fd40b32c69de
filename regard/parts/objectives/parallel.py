"""A decoder that writes all tokens at once learns each of them from a blank canvas, and the length beside them.

    loss = - sum over t of log p(y_t | source, T) - T log p(T | source)

The end token is the last position of the canvas. On a canvas that is longer than the target, what follows are end
tokens, too. Gu et al. 2018, arXiv:1711.02281. This file also holds what the other objectives of such decoders share.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import BLANK, Context, Memory, Model, UserError
from regard.data.batches import IGNORE, Batch
from regard.decode.result import at_least_float32
from regard.ops.cross_entropy import log_partition

from .next_token import token_loss
from .objective import Loss


class SpecialTokens(NamedTuple):
    """The ids that objectives need."""

    pad: int
    start: int
    end: int


class Parallel:
    """An objective of a decoder that writes all tokens at once; others inherit from it.

    head: the head that the model must have; empty: any.
    """

    folder: ClassVar[tuple[str, ...]] = ("objectives",)
    head: ClassVar[str] = ""
    splits = True  # a batch may be split

    def __init__(self, special: SpecialTokens, smoothing: float = 0.0):
        self.special, self.smoothing = special, smoothing

    @staticmethod
    def needed(target: np.ndarray) -> int:
        """Return the positions that a canvas must have for a target, which ends with the end token."""
        return len(target)

    def __call__(self, model: Model, batch: Batch) -> Loss:
        memory = encoded(model, batch)
        loss = self.target_loss(model, batch, memory)
        assert model.length is not None
        lengths = model.length.loss(memory, target_lengths(batch), batch.copies)
        return loss if lengths is None else loss._replace(loss=loss.loss + (lengths * target_lengths(batch)).sum())

    def target_loss(self, model: Model, batch: Batch, memory: Memory) -> Loss:
        """Return the loss of the target tokens, without that of the length."""
        tokens, valid, targets = self.canvas(model, batch, memory)
        x, context = hidden(model, tokens, valid, memory)
        return self.token_loss(model, x, context, targets, batch.count)

    def token_loss(
        self, model: Model, x: Tensor, context: Context, targets: Tensor, count: int, weight: float = 1.0
    ) -> Loss:
        """Return the summed loss of the targets, of which there are `count` with those that were given. weight: the
        number of tokens for each that is learned, on average. All is a sum over rows, so that a batch may be split."""
        loss, nll = token_loss(model, x, context, targets, self.smoothing, weight)
        return Loss(loss, nll.detach(), count)

    def canvas(self, model: Model, batch: Batch, memory: Memory) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return a blank canvas (batch, n), its mask, and the targets at its positions."""
        assert model.length is not None
        if model.length.is_exact:
            return torch.full_like(batch.targets, BLANK), batch.valid, batch.targets
        lengths = model.length.candidates(memory, 1).lengths[:, 0]
        check_canvas(target_lengths(batch), lengths, "the canvas")
        valid = positions(lengths)
        targets = torch.full_like(valid, self.special.end, dtype=torch.long)
        width = min(targets.shape[1], batch.targets.shape[1])
        given = batch.targets[:, :width]
        targets[:, :width] = torch.where(given == IGNORE, self.special.end, given)
        targets = targets.masked_fill(~valid, IGNORE)
        return torch.full_like(targets, BLANK), mask(valid), targets


def encoded(model: Model, batch: Batch) -> Memory:
    """Return the memory of a batch, with the copies that its fertilities say."""
    assert batch.source is not None
    return model.encode(batch.source, batch.source_valid)._replace(copies=batch.copies)


def target_lengths(batch: Batch) -> Tensor:
    """Return the number of target tokens, the end token included, (batch,)."""
    return (batch.targets != IGNORE).sum(1)


def positions(lengths: Tensor) -> Tensor:
    """Return the mask (batch, longest) of rows of these lengths."""
    return torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]


def mask(valid: Tensor) -> Tensor | None:
    """Return the mask; None where all positions are real."""
    return None if bool(valid.all()) else valid


def hidden(model: Model, tokens: Tensor, valid: Tensor | None, memory: Memory) -> tuple[Tensor, Context]:
    """Return the hidden vectors (batch, n, width) of a canvas, and its context."""
    context = Context.begin(*tokens.shape, tokens.device, valid=valid, memory=memory)
    return model.hidden(tokens, context), context


def logits_of(model: Model, x: Tensor, context: Context) -> Tensor:
    """Return logits in float32 or better."""
    return at_least_float32(model.head(x, context))


def log_probs_of(model: Model, x: Tensor, context: Context, tokens: Tensor) -> Tensor:
    """Return the log-probabilities (batch, n, m) of a few tokens (batch, m) of each row at all its positions."""
    linear = model.head.linear(x, context)
    if linear is None:
        logs = logits_of(model, x, context).log_softmax(-1)
        return logs.gather(2, tokens[:, None].expand(-1, logs.shape[1], -1))
    vectors, table, bias = linear
    with torch.autocast(x.device.type, enabled=False):  # log-probabilities need the precision of the table
        vectors = vectors.to(table.dtype)
        logits = vectors @ F.embedding(tokens, table).mT
        if bias is not None:
            logits = logits + bias[tokens][:, None]
        return logits - log_partition(vectors, table, bias)[..., None]


def check_canvas(needed: Tensor, lengths: Tensor, what: str) -> None:
    """Refuse targets that need more positions than their canvas has."""
    short = (needed > lengths).nonzero()
    if len(short):
        row = int(short[0, 0])
        ratio = float((needed / lengths).max())
        raise UserError(
            f"a target needs {int(needed[row])} positions, and {what} has {int(lengths[row])}: make model.length.ratio "
            f"at least {ratio:.2g} times as large, or leave out such pairs (--max-length)"
        )


def generator_for(batch: Batch, training: bool) -> torch.Generator | None:
    """Return the random numbers of an objective: torch's own in training, and always the same ones in evaluation."""
    return None if training else torch.Generator(batch.targets.device).manual_seed(len(batch.targets))


def random_scores(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return random numbers from 0 to 1 of the shape of `like`."""
    return torch.rand(like.shape, device=like.device, generator=generator)
