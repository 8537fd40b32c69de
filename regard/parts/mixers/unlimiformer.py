"""Cross-attention with retrieval: each head of each query attends to its k nearest keys in a memory of any length.

    near(i) = the k keys j with the largest q_i . k_j        in each head
    o_i     = sum over j in near(i) of  softmax_j(q_i . k_j / sqrt(dim))  v_j

Bertsch et al. 2023, "Unlimiformer", arXiv:2305.01625. The softmax gives almost no weight to
distant keys, so little is lost, and nothing if k is at least the length of the memory. It has no parameters of its own:
a Transformer trained on short sources can use it directly. The search is exact, and compares a query with every key.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.bases import AttentionMask
from regard.bases.multihead import MultiHead
from regard.core import Norm, Place, Position, Score, UserError
from regard.ops.attention import masked_softmax

QUERY_BLOCK = 256  # queries at a time, which bounds the memory of the scores


class Unlimiformer(MultiHead):
    """Multi-head attention over the k nearest keys of the encoder's memory.

    nearest:  k above.
    The other arguments are those of attention: kv_heads, dim, position, score (a dot product), bias, norm, qk_norm,
    weight_dropout.
    """

    examples = (
        {"nearest": 3},
        {"nearest": 5, "kv_heads": 1, "bias": False, "position": "rotary"},
        {"nearest": 64},
        {"nearest": 1, "position": "shaw"},
    )

    def __init__(
        self,
        width: int,
        heads: int,
        nearest: int,
        kv_heads: int | None = None,
        dim: int | None = None,
        position: Position | str | dict = "none",
        score: Score | str | dict = "scaled_dot",
        bias: bool | str = True,
        norm: Norm | str | dict = "none",
        qk_norm: Norm | str | dict = "none",
        weight_dropout: float = 0.0,
        place: Place | None = None,
    ):
        super().__init__(
            width=width,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            over="memory",
            position=position,
            score=score,
            bias=bias,
            norm=norm,
            qk_norm=qk_norm,
            weight_dropout=weight_dropout,
            place=place,
        )
        if nearest < 1:
            raise UserError(f"nearest must be at least 1, not {nearest}")
        if not self.score.is_dot:
            raise UserError("the nearest keys are found by dot product: choose a score that is one")
        self.nearest = nearest

    def look(self, x: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask, valid: Tensor | None) -> Tensor:
        if keys.shape[1] <= self.nearest:
            return super().look(x, keys, values, mask, valid)
        q, plain = self.queries(x, mask.query_at)
        group = self.heads // self.kv_heads
        k, v = (t.transpose(1, 2).repeat_interleave(group, 1) for t in (keys, values))  # (batch, heads, m, dim)
        if q.shape[2] <= QUERY_BLOCK or self.attend.weights.watched:
            y = self._retrieve(q, k, v, mask, plain)
        else:
            recompute = torch.is_grad_enabled()
            blocks = []
            for begin in range(0, q.shape[2], QUERY_BLOCK):  # the backward pass recomputes the scores of a block
                rows = slice(begin, begin + QUERY_BLOCK)
                block = (q[:, :, rows], k, v, mask._replace(query_at=mask.query_at[:, rows]), plain[:, :, rows])
                blocks.append(
                    checkpoint(self._retrieve, *block, use_reentrant=False) if recompute else self._retrieve(*block)
                )
            y = torch.cat(blocks, 2)
        return self.out(self.norm(y.transpose(1, 2).flatten(-2), valid))

    def _retrieve(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, plain: Tensor) -> Tensor:
        scores = q @ k.mT  # (batch, heads, n, m)
        bias = self.position.bias(mask.query_at[:, None, :, None], mask.key_at[:, None, None, :], plain)
        scores = scores if bias is None else scores + bias
        scores = scores.masked_fill((mask.key_at < 0)[:, None, None, :], float("-inf"))
        threshold = scores.detach().topk(self.nearest, -1, sorted=False).values.amin(-1, keepdim=True)
        weights = self.attend.weights(masked_softmax(scores.masked_fill(scores < threshold, float("-inf"))))
        weights = F.dropout(weights, self.attend.dropout, self.training)
        y = weights @ v
        extra = self.position.output_bias(weights, mask.query_at[:, None, :, None], mask.key_at[:, None, None, :])
        return y if extra is None else y + extra
