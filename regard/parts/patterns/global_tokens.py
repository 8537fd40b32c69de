"""Global tokens: a few positions attend to everything, and every query attends to them.

    query is global    or    key is global

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
    """count: number of global positions at the start of the sequence.
    at:    further global positions: global_tokens(at=(0, 17, 35)).
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
        return self._is_global(query_at) | self._is_global(key_at)

    def keeps(self, key_at: Tensor, now: Tensor) -> Tensor:
        last = max(self.count - 1, *self.at, -1)
        return self._is_global(key_at) | (now <= last)  # all keys are kept until the last global query

    def _is_global(self, at: Tensor) -> Tensor:
        first = (at >= 0) & (at < self.count)
        if not self.at:
            return first
        return first | (at[..., None] == torch.tensor(self.at, dtype=at.dtype, device=at.device)).any(-1)
