"""The target is one of the paths through a directed acyclic graph of positions; the sum over all paths is learned.

The first position says the start token and the last one the end token. With glancing, some tokens of the most probable
path are shown. Huang et al. 2022, "Directed Acyclic Transformer", arXiv:2205.07459.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from regard.core import BLANK, Context, Memory, Model
from regard.data.batches import IGNORE, Batch
from regard.ops import dag

from .glancing import Glancing
from .objective import Loss
from .parallel import SpecialTokens, check_canvas, hidden, log_probs_of, logits_of, mask, positions


class Dag(Glancing):
    """ratio, last_ratio: of the tokens shown to the wrong ones, at the beginning and at the end of training."""

    head = "dag"

    def __init__(self, special: SpecialTokens, smoothing: float = 0.0, ratio: float = 0.5, last_ratio: float = 0.1):
        super().__init__(special, smoothing, ratio, last_ratio)

    @staticmethod
    def needed(target: np.ndarray) -> int:
        return len(target) + 1  # the start token

    def target_loss(self, model: Model, batch: Batch, memory: Memory) -> Loss:
        assert model.length is not None
        starts = torch.full_like(batch.targets[:, :1], self.special.start)
        targets = torch.cat((starts, batch.targets.masked_fill(batch.targets == IGNORE, self.special.pad)), 1)
        lengths, vertices = (batch.targets != IGNORE).sum(1) + 1, model.length.candidates(memory, 1).lengths[:, 0]
        check_canvas(lengths, vertices, "its graph")
        valid = positions(vertices)
        tokens = torch.full_like(valid, BLANK, dtype=torch.long)
        if model.training:
            with torch.no_grad():
                x, context = hidden(model, tokens, mask(valid), memory)
                match, links = self.graph(model, x, context, targets)
                path = dag.best_alignment(match, links, lengths, vertices)
                said = logits_of(model, x, context).argmax(-1).gather(1, path.clamp(min=0))
                shown = self.shown(said, targets.masked_fill(path < 0, IGNORE), self.ratio_at(batch.progress))
            padded = torch.cat((tokens, tokens[:, :1]), 1)  # a last column for what is not shown
            at = torch.where(shown, path, tokens.shape[1])
            tokens = padded.scatter(1, at, torch.where(shown, targets, BLANK))[:, :-1]
        match, links = self.graph(model, *hidden(model, tokens, mask(valid), memory), targets)
        loss = -dag.log_likelihood(match, links, lengths, vertices).sum()
        return Loss(loss, loss.detach(), batch.count)

    @staticmethod
    def graph(model: Model, x: Tensor, context: Context, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities (batch, m, n) of target tokens at vertices, and those (batch, n, n) of links."""
        links = model.head.links(x, context)  # type: ignore[operator]
        return log_probs_of(model, x, context, targets).mT, links
