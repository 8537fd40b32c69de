"""Adaptive softmax for large vocabularies: first over the frequent tokens and the groups of rare ones, then over the
tokens of a group, with narrower vectors.

    log p(w) = log softmax(E_0 D_0 x + b_0)[w or its group g]  +  log softmax(E_g D_g x + b_g)[w]  if g > 0

Grave et al. 2017, "Efficient softmax approximation for GPUs", arXiv:1609.04309; as in Dai et al. 2019,
"Transformer-XL", arXiv:1901.02860.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.bases.groups import Group
from regard.core import Context, Embed, Head, UserError
from regard.core.contracts import new_table
from regard.schema import name_of


class Adaptive(Head):
    """cutoffs: first token id of every group after the first.
    divide:     the channels of a group are those of the group before it divided by this; 1: there is one table.
    channels:   channels of the first group; None: the width.
    shared:     for each group, whether it also shares the projection of the embedding when the model is tied; False for
                groups beyond the list.
    """

    examples = ({"cutoffs": [7, 18], "divide": 2}, {"channels": 10}, {"cutoffs": [5, 11], "channels": 9})

    def __init__(
        self,
        width: int,
        vocab: int,
        cutoffs: list | None = None,
        divide: int = 1,
        channels: int | None = None,
        shared: list | None = None,
    ):
        super().__init__()
        self.groups = Group.of(vocab, cutoffs or [], divide, channels or width)
        self.shared = shared or []
        self.one = divide == 1
        dim = self.groups[0].dim
        tables = [new_table(vocab, dim)] if self.one else [new_table(g.end - g.begin, g.dim) for g in self.groups]
        self.table, self.tails = tables[0], nn.ParameterList(tables[1:])
        self.biases = nn.ParameterList(torch.zeros(len(table)) for table in tables)
        projected = not self.one or dim != width
        self.maps = nn.ParameterList(new_table(width, group.dim) for group in self.groups if projected)
        if rare := len(self.groups) - 1:
            self.of_group, self.group_bias = new_table(rare, dim), nn.Parameter(torch.zeros(rare))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return log-probabilities (batch, time, vocab), or logits where there is one group."""
        frequent, rare = self.groups[0].end, len(self.groups) - 1
        first = self._logits(x, 0)
        if not rare:
            return first
        first = first.log_softmax(-1)
        found = [first[..., :frequent]]
        for g in range(1, rare + 1):
            found.append(first[..., frequent + g - 1, None] + self._logits(x, g).log_softmax(-1))
        return torch.cat(found, -1)

    def _logits(self, x: Tensor, g: int) -> Tensor:
        """Return the logits of the tokens of group g; for the first group, those of the other groups follow."""
        begin, end, _ = self.groups[g]
        table, bias = (self.table, *self.tails)[0 if self.one else g], self.biases[0 if self.one else g]
        if self.one:
            table, bias = table[begin:end], bias[begin:end]
        if g == 0 and len(self.groups) > 1:
            table, bias = torch.cat((table, self.of_group)), torch.cat((bias, self.group_bias))
        return F.linear(F.linear(x, self.maps[g].mT) if len(self.maps) else x, table, bias)

    def target_logprobs(self, x: Tensor, context: Context, targets: Tensor) -> Tensor | None:
        if len(self.groups) == 1:
            return None
        asked = targets >= 0
        x, targets, frequent = x[asked], targets[asked], self.groups[0].end
        classes, rare = targets.clone(), []
        for g, (begin, end, _) in enumerate(self.groups[1:], 1):
            inside = (targets >= begin) & (targets < end)
            classes = torch.where(inside, frequent + g - 1, classes)
            if bool(inside.any()):
                found = self._logits(x[inside], g).log_softmax(-1).gather(1, targets[inside, None] - begin)[:, 0]
                rare.append((inside, found))
        logs = self._logits(x, 0).log_softmax(-1).gather(1, classes[:, None])[:, 0]
        for inside, found in rare:
            logs = logs.masked_scatter(inside, logs[inside] + found)
        return logs

    def linear(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor | None] | None:
        if len(self.groups) > 1:
            return None
        return F.linear(x, self.maps[0].mT) if len(self.maps) else x, self.table, self.biases[0]

    def tie(self, embed: Embed) -> None:
        """Share the tables of the embedding, and its projections where `shared` says so."""
        ours, theirs = (self.table, *self.tails), (embed.table, *getattr(embed, "tails", ()))
        if [t.shape for t in ours] != [None if t is None else t.shape for t in theirs]:
            raise UserError(
                f"an adaptive head cannot be tied to the embed '{name_of(embed)}': its tables have other shapes"
            )
        self.table, self.tails = theirs[0], nn.ParameterList(theirs[1:])
        maps = list(getattr(embed, "maps", ()))
        for g, own in enumerate(self.maps):
            if g < len(self.shared) and self.shared[g]:
                other = maps[0 if self.one else g] if maps else None
                if other is None or other.shape != own.shape:
                    raise UserError(
                        f"projection {g} of the head is {tuple(own.shape)}, and the embed has none of this shape"
                    )
                self.maps[g] = other

    def flops(self, length: int) -> int:
        tables = [*self.tails, *([self.of_group] if len(self.groups) > 1 else []), *self.maps, self.table]
        return sum(2 * length * t.numel() for t in tables)
