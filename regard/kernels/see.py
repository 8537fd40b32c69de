"""Who may look at whom in one call of a kernel."""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.core import Pattern
from regard.core.pattern import cycle


class See(NamedTuple):
    """A pattern at given places.

    fresh: queries and keys are positions 0, 1, 2, ... of the same rows, in order.
    holes: some key_at may be -1, a key that nobody may see.
    known: where several calls ask the same, what was found out before.
    held:  (batch, m or more) the row that holds each key; None: every row its own.
    """

    pattern: Pattern
    query_at: Tensor  # (batch or 1, n)
    key_at: Tensor  # (batch or 1, m)
    fresh: bool = False
    holes: bool = False
    known: dict[tuple[Pattern, int], tuple[Tensor | None, bool]] | None = None
    held: Tensor | None = None

    @property
    def causal_only(self) -> bool:
        """Nothing but 'not ahead', which index order alone decides."""
        return self.fresh and not self.holes and str(self.pattern) == "causal"

    def mask(self, heads: int) -> Tensor | None:
        """(batch or 1, heads or 1, n, m), True where a query may look; None when it may look everywhere."""
        if str(self.pattern) == "everything":
            return (self.key_at >= 0)[:, None, None, :] if self.holes else None
        return self.at(self.query_at[:, None, :, None], self.key_at[:, None, None, :], heads)

    def hidden(self, heads: int) -> tuple[Tensor | None, bool]:
        """The mask, None where it hides nothing (it would still cost; but to ask another device would cost more), and
        whether every query is known to see something."""
        if self.known is not None and (self.pattern, heads) in self.known:
            return self.known[self.pattern, heads]
        mask = self.mask(heads)
        found = mask, mask is None
        if mask is not None and mask.device.type == "cpu":
            found = (None, True) if bool(mask.all()) else (mask, bool(mask.any(-1).all()))
        if self.known is not None:
            self.known[self.pattern, heads] = found
        return found

    def added(self, heads: int, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """What a kernel of our own wants: a bias with all that is hidden, or True for what is not, or neither."""
        mask = self.hidden(heads)[0]
        if bias is None:
            return mask
        return (bias if mask is None else bias.masked_fill(~mask, float("-inf"))).to(dtype)

    def at(self, query_at: Tensor, key_at: Tensor, heads: int) -> Tensor:
        """The same for places chosen by the caller: (b, 1, n, 1) and (b, 1, 1, m)."""
        allowed = self.pattern.allows(query_at, key_at)
        if self.holes:
            allowed = allowed & (key_at >= 0)
        return cycle(allowed, heads)
