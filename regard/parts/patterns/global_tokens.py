"""A few positions that see everybody and are seen by everybody: the hubs of a sparse pattern.

    query in hubs    or    key in hubs

Beltagy et al. 2020, "Longformer", arXiv:2004.05150; Zaheer et al. 2020, "Big Bird", arXiv:2007.14062.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.core import Pattern, UserError
from regard.pattern.algebra import check_int


@dataclass(frozen=True)
class GlobalTokens(Pattern):
    """count: the first so many positions.
    at:    further positions, wherever they are: global_tokens(at=(0, 17, 35)).
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"count": 2}, {"at": (0, 9, 21)}, {"count": 1, "at": (30,)})
    count: int = 0
    at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_int("global_tokens.count", self.count, 0)
        if not isinstance(self.at, tuple | list):
            raise UserError(f"at of global_tokens lists positions, such as at=(0, 17), not {self.at!r}")
        for place in self.at:
            check_int("a position in global_tokens.at", place, 0)
        if not self.count and not self.at:
            raise UserError("global_tokens needs a count or positions: global_tokens(2) or global_tokens(at=(0, 17))")
        object.__setattr__(self, "at", tuple(self.at))

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        return self._hub(query_at) | self._hub(key_at)

    def keeps(self, key_at: Tensor, now: Tensor) -> Tensor:
        return self._hub(key_at) | (now <= max(self.count - 1, *self.at, -1))  # until the last hub has looked

    def _hub(self, at: Tensor) -> Tensor:
        first = (at >= 0) & (at < self.count)
        if not self.at:
            return first
        return first | (at[..., None] == torch.tensor(self.at, dtype=at.dtype, device=at.device)).any(-1)
