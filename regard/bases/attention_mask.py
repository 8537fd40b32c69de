"""Which queries attend to which keys in one call of a kernel."""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.core import Pattern
from regard.pattern.algebra import cycle


class AttentionMask(NamedTuple):
    """A pattern at given positions of queries and keys.

    from_start: queries and keys are positions 0, 1, 2, ... of the same rows, in order.
    holes: some key_at may be -1, a key that no query may attend to.
    cache: masks that were computed before, where several calls need the same.
    row_owner: (batch, m or more) the row whose cache holds each key; None where every row has its own.
    """

    pattern: Pattern
    query_at: Tensor  # (batch or 1, n)
    key_at: Tensor  # (batch or 1, m)
    from_start: bool = False
    holes: bool = False
    cache: dict[tuple[Pattern, int], tuple[Tensor | None, bool]] | None = None
    row_owner: Tensor | None = None

    @property
    def causal_only(self) -> bool:
        """Whether the mask is the lower triangle and nothing else."""
        return self.from_start and not self.holes and str(self.pattern) == "causal"

    def full_mask(self, heads: int) -> Tensor | None:
        """Return (batch or 1, heads or 1, n, m), True where a query may attend; None when it may everywhere."""
        if str(self.pattern) == "everything":
            return (self.key_at >= 0)[:, None, None, :] if self.holes else None
        return self.at(self.query_at[:, None, :, None], self.key_at[:, None, None, :], heads)

    def mask(self, heads: int) -> tuple[Tensor | None, bool]:
        """Return the mask, None on a CPU where it hides nothing, and whether every query is known to attend to
        something. Other devices are not asked: to wait for them would cost more."""
        if self.cache is not None and (self.pattern, heads) in self.cache:
            return self.cache[self.pattern, heads]
        mask = self.full_mask(heads)
        found = mask, mask is None
        if mask is not None and mask.device.type == "cpu":
            found = (None, True) if bool(mask.all()) else (mask, bool(mask.any(-1).all()))
        if self.cache is not None:
            self.cache[self.pattern, heads] = found
        return found

    def as_attn_mask(self, heads: int, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Return what is added to logits: the bias with -inf where it is masked; without a bias, the mask or None."""
        mask = self.mask(heads)[0]
        if bias is None:
            return mask
        return (bias if mask is None else bias.masked_fill(~mask, float("-inf"))).to(dtype)

    def at(self, query_at: Tensor, key_at: Tensor, heads: int) -> Tensor:
        """Return the mask for positions chosen by the caller: (b, 1, n, 1) and (b, 1, 1, m)."""
        allowed = self.pattern.allows(query_at, key_at)
        if self.holes:
            allowed = allowed & (key_at >= 0)
        return cycle(allowed, heads)
