"""Pictures and texts that belong together should find each other among all those of a batch.

    loss = sum over pairs i of  - 1/2 log p(text i | picture i) - 1/2 log p(picture i | text i)

Radford et al. 2021, "CLIP", arXiv:2103.00020.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import Towers
from regard.data.batches import Batch

from .objective import Loss

MOST = 100.0  # what a cosine is multiplied by at the most, as in the paper


class Contrastive:
    def __call__(self, model: Towers, batch: Batch) -> Loss:
        nll = both_ways(scores_of(model, batch))
        return Loss(nll, nll.detach(), batch.count)


def scores_of(model: Towers, batch: Batch) -> Tensor:
    """(pictures, texts), the right ones on the diagonal."""
    assert batch.source is not None
    return model.similarity(
        model.encode_images(batch.source), model.encode_texts(batch.tokens, batch.valid), MOST
    ).float()


def both_ways(scores: Tensor) -> Tensor:
    """The loss of scores (pictures, texts)."""
    right = torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(scores, right, reduction="sum") + F.cross_entropy(scores.mT, right, reduction="sum")) / 2
