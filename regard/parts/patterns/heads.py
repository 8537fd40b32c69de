"""One pattern per head, so that the heads of a layer attend in different ways.

    heads(window(8), stride(8))        local attention in heads 0, 2, ..., strided attention in heads 1, 3, ...

Child et al. 2019, "Generating Long Sequences with Sparse Transformers", arXiv:1904.10509.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.core import Pattern, UserError


@dataclass(frozen=True)
class Heads(Pattern):
    """each: the patterns (or their string forms), cycled over the heads: head h uses pattern h modulo their number."""

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"each": ("causal", "stride(5)", "first(2)")},
        {"each": ("causal & window(4)", "causal & fixed(8, 2, 2)", "window(3, 0)")},
    )
    variadic: ClassVar[bool] = True
    each: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.each, tuple | list) or not self.each:
            raise UserError("heads needs at least one pattern: heads(window(8), stride(8))")
        for given in self.each:
            if not isinstance(given, Pattern | str):
                raise UserError(f"heads takes patterns, not {given!r}")
        each = tuple(Pattern.parse(given) if isinstance(given, str) else given for given in self.each)
        object.__setattr__(self, "each", each)

    @property
    def inner(self) -> tuple[Pattern, ...]:
        return self.each

    @property
    def causal(self) -> bool:
        return all(pattern.causal for pattern in self.each)

    @property
    def heads(self) -> int:
        return math.lcm(len(self.each), *(pattern.heads for pattern in self.each))

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        made = [pattern.allows(query_at, key_at) for pattern in self.each]
        made = [allowed if allowed.dim() > 2 else allowed[None] for allowed in made]
        ours = []
        for head in range(self.heads):
            allowed = made[head % len(made)]
            ours.append(allowed.narrow(-3, head % allowed.shape[-3], 1))
        return torch.cat(torch.broadcast_tensors(*ours), -3)

    def reaching(self, positions: int) -> Pattern:
        return Heads(tuple(pattern.reaching(positions) for pattern in self.each))

    def keeps(self, key_at: Tensor, now: Tensor) -> Tensor:
        kept = self.each[0].keeps(key_at, now)
        for pattern in self.each[1:]:
            kept = kept | pattern.keeps(key_at, now)
        return kept
