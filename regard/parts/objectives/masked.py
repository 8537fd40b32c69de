"""Masked language modeling: some tokens of a text are masked and predicted; and of two texts, whether the second one
follows the first.

    loss = - sum over the chosen tokens of log p(token | the rest) - their number x mean of log p(next or not)

Devlin et al. 2019, "BERT", arXiv:1810.04805. Newly chosen tokens in every epoch: Liu et al. 2019, "RoBERTa",
arXiv:1907.11692.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import Context, Model, UserError
from regard.data.batches import IGNORE, Batch

from .next_token import token_loss
from .objective import Loss


@dataclass(frozen=True)
class MaskingConfig:
    """A recipe's [objective] with part = "masked".

    share:         share of the tokens that are predicted: 80% of them are masked, 10% replaced by random ones, 10%
                   kept.
    whole_word:    the pieces of a word are chosen together.
    next_sentence: a row is two texts, and the model also predicts whether the second follows the first.
    """

    share: float = 0.15
    whole_word: bool = False
    next_sentence: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise UserError(f"objective.share must be between 0 and 1, not {self.share}")


class Masked:
    """smoothing: label smoothing of the tokens."""

    splits = True  # a batch may be split

    def __init__(self, smoothing: float = 0.0):
        self.smoothing = smoothing

    def __call__(self, model: Model, batch: Batch) -> Loss:
        x, context = hidden_states(model, batch)
        loss, nll = token_loss(model, x, context, batch.targets, self.smoothing)
        if batch.next_sentence_labels is not None:
            pairs = pair_logits(model, x, context)
            loss = loss + batch.count * F.cross_entropy(pairs, batch.next_sentence_labels)
        return Loss(loss, nll.detach(), batch.count)


def hidden_states(model: Model, batch: Batch) -> tuple[Tensor, Context]:
    """Return the hidden states before the head, (batch, time, width), and the context."""
    masks = {"valid": batch.valid, "segments": batch.segments}
    context = Context.begin(*batch.tokens.shape, batch.tokens.device, **masks)
    return model.hidden(batch.tokens, context), context


def token_logits(model: Model, x: Tensor, context: Context, at: Tensor) -> Tensor:
    """Return logits (positions, vocab), in float32 or better, where `at` (batch, time) is True. Those of other
    positions are never computed if the head is linear."""
    linear = model.head.linear(x, context)
    logits = model.head(x, context)[at] if linear is None else F.linear(linear[0][at], *linear[1:])
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def pair_logits(model: Model, x: Tensor, context: Context) -> Tensor:
    """Return logits (batch, 2) of a head that predicts whether a text follows another."""
    logits = model.head.pair(x, context)  # type: ignore[operator]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


@torch.no_grad()
def masked_metrics(model: Model, batches: Iterable[Batch]) -> dict[str, float]:
    """Return the loss per predicted token, their accuracy in percent, and that of the pairs."""
    device = next(model.parameters()).device
    nll = right = count = pairs = pairs_right = 0.0
    for batch in batches:
        batch = batch.to(device)
        x, context = hidden_states(model, batch)
        at = batch.targets != IGNORE
        logits, targets = token_logits(model, x, context, at), batch.targets[at]
        nll += float(F.cross_entropy(logits, targets, reduction="sum").double())
        right += int((logits.argmax(-1) == targets).sum())
        count += len(targets)
        if batch.next_sentence_labels is not None:
            pairs_right += int((pair_logits(model, x, context).argmax(-1) == batch.next_sentence_labels).sum())
            pairs += len(batch.next_sentence_labels)
    found = {"loss": nll / max(count, 1), "accuracy": 100 * right / max(count, 1)}
    return found | ({"next_sentence": 100 * pairs_right / pairs} if pairs else {})
