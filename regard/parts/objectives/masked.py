"""Some tokens of a text are hidden and asked for; and of two texts, whether the second one follows the first.

    loss = - sum over the tokens asked for of log p(token | the rest) - their number x mean of log p(next or not)

Devlin et al. 2019, "BERT", arXiv:1810.04805. New tokens in every epoch: Liu et al. 2019, "RoBERTa", arXiv:1907.11692.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import Context, Model, UserError
from regard.data.batches import IGNORE, Batch

from .next_token import of_tokens
from .objective import Loss


@dataclass(frozen=True)
class Noise:
    """A recipe's [objective] with part = "masked".

    share:         of the tokens that are asked for: 80 in 100 are hidden, 10 replaced by others, 10 left.
    whole_word:    the pieces of a word are asked for together.
    next_sentence: a row is two texts, and it is asked whether the second follows the first.
    """

    share: float = 0.15
    whole_word: bool = False
    next_sentence: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise UserError(f"objective.share must be between 0 and 1, not {self.share}")


class Masked:
    """smoothing: of the tokens."""

    splits = True  # a batch may come in parts

    def __init__(self, smoothing: float = 0.0):
        self.smoothing = smoothing

    def __call__(self, model: Model, batch: Batch) -> Loss:
        x, context = vectors(model, batch)
        loss, nll = of_tokens(model, x, context, batch.targets, self.smoothing)
        if batch.next_sentence_labels is not None:
            pairs = pair_scores(model, x, context)
            loss = loss + batch.count * F.cross_entropy(pairs, batch.next_sentence_labels)
        return Loss(loss, nll.detach(), batch.count)


def vectors(model: Model, batch: Batch) -> tuple[Tensor, Context]:
    """Before the head: (batch, time, width)."""
    known = {"valid": batch.valid, "segments": batch.segments}
    context = Context.begin(*batch.tokens.shape, batch.tokens.device, **known)
    return model.hidden(batch.tokens, context), context


def token_scores(model: Model, x: Tensor, context: Context, at: Tensor) -> Tensor:
    """Where `at` (batch, time) is True: (places, vocab) in float32 at least, without ever holding those of other
    places."""
    linear = model.head.linear(x, context)
    scores = model.head(x, context)[at] if linear is None else F.linear(linear[0][at], *linear[1:])
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def pair_scores(model: Model, x: Tensor, context: Context) -> Tensor:
    """(batch, 2), of a model whose head tells whether a text follows another."""
    scores = model.head.pair(x, context)  # type: ignore[operator]
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


@torch.no_grad()
def measured(model: Model, batches: Iterable[Batch]) -> dict[str, float]:
    """Loss per token that is asked for, how many in a hundred of them are right, and how many pairs."""
    device = next(model.parameters()).device
    nll = right = count = pairs = pairs_right = 0.0
    for batch in batches:
        batch = batch.to(device)
        x, context = vectors(model, batch)
        at = batch.targets != IGNORE
        scores, targets = token_scores(model, x, context, at), batch.targets[at]
        nll += float(F.cross_entropy(scores, targets, reduction="sum").double())
        right += int((scores.argmax(-1) == targets).sum())
        count += len(targets)
        if batch.next_sentence_labels is not None:
            pairs_right += int((pair_scores(model, x, context).argmax(-1) == batch.next_sentence_labels).sum())
            pairs += len(batch.next_sentence_labels)
    found = {"loss": nll / max(count, 1), "accuracy": 100 * right / max(count, 1)}
    return found | ({"next_sentence": 100 * pairs_right / pairs} if pairs else {})
