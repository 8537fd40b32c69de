"""Contrastive learning of images and texts: each should be most similar to its counterpart in the batch.

    loss = sum over pairs i of  - 1/2 log p(text i | image i) - 1/2 log p(image i | text i)

Radford et al. 2021, "CLIP", arXiv:2103.00020.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import Towers
from regard.data.batches import Batch

from .objective import Loss

MAX_SCALE = 100.0  # maximum factor on the cosines, as in the paper


class Contrastive:
    def __call__(self, model: Towers, batch: Batch) -> Loss:
        nll = symmetric_cross_entropy(similarity_logits(model, batch))
        return Loss(nll, nll.detach(), batch.count)


def similarity_logits(model: Towers, batch: Batch) -> Tensor:
    """Return logits (images, texts), with the matching pairs on the diagonal."""
    assert batch.source is not None
    images, texts = model.encode_images(batch.source), model.encode_texts(batch.tokens, batch.valid)
    return model.similarity(images, texts, MAX_SCALE).float()


def symmetric_cross_entropy(logits: Tensor) -> Tensor:
    """Return the summed loss of logits (images, texts)."""
    targets = torch.arange(len(logits), device=logits.device)
    return (
        F.cross_entropy(logits, targets, reduction="sum") + F.cross_entropy(logits.mT, targets, reduction="sum")
    ) / 2
