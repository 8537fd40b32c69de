"""Rotary positions (RoPE): each pair of channels of a query and a key is rotated by an angle proportional to the
position, so that their dot product depends only on the distance between them.

    (q_2i, q_2i+1) at position n  ->  rotated by n w_i,      w_i = base^(-2i/dim)

Su et al. 2021, "RoFormer", arXiv:2104.09864. A model trained on short sequences reads longer ones when the
frequencies are lowered: the scalings below. None of them may depend on the length of the current sequence, as "dynamic"
and "longrope" do elsewhere: cached keys would have been rotated at other frequencies than those of a longer sequence,
and the output would depend on how the sequence was cut. Here the length is declared once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, cat

from regard.core import Context, Position, UserError
from regard.core.fusion import RotaryTables
from regard.errors import nearest
from regard.ops.rotary import angles, frequencies, rotate
from regard.schema import check_arguments


class Rotary(Position):
    """layout: "halves": channel i is paired with channel i + dim/2 (Llama, NeoX); "interleaved": neighboring channels
               are paired (paper, GPT-J).
    base:      base of the geometric series of frequencies.
    fraction:  fraction of the channels of a head that are rotated, the first ones (NeoX 0.25).
    scaling:   a table { kind = "llama3", ... } for sequences longer than those of training: linear, dynamic, llama3,
               yarn, longrope.
    """

    relative = True
    examples = (
        {},
        {"layout": "interleaved", "base": 500.0, "fraction": 0.5},
        {"scaling": {"kind": "linear", "factor": 4}},
        {"scaling": {"kind": "dynamic", "factor": 2.0, "original": 8, "length": 32}},
        {"scaling": {"kind": "llama3", "factor": 8.0, "original": 16}},
        {"scaling": {"kind": "yarn", "factor": 4.0, "original": 8, "fast": 2.0, "slow": 0.1}},
        {
            "fraction": 0.5,
            "scaling": {"kind": "longrope", "short": [1.0, 1.5], "long": [2.0, 3.0], "original": 8, "length": 32},
        },
    )

    def __init__(
        self,
        dim: int,
        layout: str = "halves",
        base: float = 10000.0,
        fraction: float = 1.0,
        scaling: dict | None = None,
    ):
        super().__init__()
        if layout not in ("interleaved", "halves"):
            raise UserError(f"layout must be 'interleaved' or 'halves', not '{layout}'")
        self.layout, self.rotated = layout, int(dim * fraction)
        if not 2 <= self.rotated <= dim or self.rotated % 2:
            raise UserError(
                f"rotary positions rotate an even number of channels, and fraction {fraction} of dim {dim} is "
                f"{self.rotated}: change one of them"
            )
        self.rates, self.strength = frequencies(self.rotated, base), 1.0
        if scaling is not None:
            scaled = _scaling(scaling)
            self.rates, self.strength = tuple(scaled.rates(self.rates, base)), scaled.strength

    def cos_sin(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each (..., pairs), for positions (...)."""
        angle = angles(at, self.rates)
        return angle.cos() * self.strength, angle.sin() * self.strength

    def query(self, q: Tensor, at: Tensor) -> Tensor:
        return self._rotate(q, at)

    def key(self, k: Tensor, at: Tensor) -> Tensor:
        return self._rotate(k, at)

    def rotary_tables(self, context: Context, dtype: torch.dtype) -> RotaryTables:
        halves = self.layout == "halves"

        def compute() -> RotaryTables:
            at = context.positions[:1] if context.last_position == int(context.positions.min()) else context.positions
            cos, sin = (t.to(dtype).contiguous() for t in self.cos_sin(at[:, 0]))
            return RotaryTables(cos, sin, halves)

        return context.cached(("rotary", self.rates, self.strength, halves, dtype), compute)

    def _rotate(self, x: Tensor, at: Tensor) -> Tensor:
        cos, sin = (t[:, None].to(x.dtype) for t in self.cos_sin(at))  # (batch or 1, 1, time, pairs)
        if self.rotated == x.shape[-1]:
            return rotate(x, cos, sin, self.layout)
        return cat((rotate(x[..., : self.rotated], cos, sin, self.layout), x[..., self.rotated :]), -1)


@dataclass(frozen=True)
class Linear:
    """All frequencies are divided by `factor`. Chen et al. 2023, arXiv:2306.15595."""

    factor: float
    strength = 1.0

    def rates(self, rates: tuple[float, ...], base: float) -> list[float]:
        return [rate / self.factor for rate in rates]


@dataclass(frozen=True)
class Dynamic:
    """The base is raised, so that the lowest frequency is lowered most and the highest not at all ("NTK-aware").

    length:   maximum sequence length; elsewhere it is the current length, see above. Up to `original`, nothing changes.
    original: sequence length in training.
    """

    factor: float
    original: int
    length: int
    strength = 1.0

    def rates(self, rates: tuple[float, ...], base: float) -> list[float]:
        growth = self.factor * max(self.length / self.original, 1.0) - (self.factor - 1)
        return [rate * growth ** (-i / max(len(rates) - 1, 1)) for i, rate in enumerate(rates)]


@dataclass(frozen=True)
class Llama3:
    """Frequencies with fewer than `low` periods in `original` positions are divided by `factor`, those with more than
    `high` periods are kept, and those in between are interpolated smoothly. Llama 3.1, arXiv:2407.21783."""

    factor: float
    original: int
    low: float = 1.0
    high: float = 4.0
    strength = 1.0

    def __post_init__(self) -> None:
        if self.high <= self.low:
            raise UserError(f"llama3 needs high above low, not {self.high} and {self.low}")

    def rates(self, rates: tuple[float, ...], base: float) -> list[float]:
        def scaled(rate: float) -> float:
            periods = self.original * rate / (2 * math.pi)
            kept = min(max((periods - self.low) / (self.high - self.low), 0.0), 1.0)
            return kept * rate + (1 - kept) * rate / self.factor

        return [scaled(rate) for rate in rates]


@dataclass(frozen=True)
class Yarn:
    """Like llama3, with a ramp that is linear in the index of the pair, and with an attention temperature. Peng et al.
    2023, "YaRN", arXiv:2309.00071.

    fast, slow: pairs with more than `fast` periods in `original` positions are kept, with fewer than `slow` divided.
    attention:  factor on queries and keys; None: 0.1 ln(factor) + 1.
    whole:      the ends of the ramp are rounded to integers.
    """

    factor: float
    original: int
    fast: float = 32.0
    slow: float = 1.0
    attention: float | None = None
    whole: bool = True

    def __post_init__(self) -> None:
        if not self.fast > self.slow > 0:
            raise UserError(f"yarn needs fast above slow above 0, not {self.fast} and {self.slow}")

    @property
    def strength(self) -> float:
        return (
            (0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0) if self.attention is None else self.attention
        )

    def rates(self, rates: tuple[float, ...], base: float) -> list[float]:
        def pair(turns: float) -> float:
            return len(rates) * math.log(self.original / (turns * 2 * math.pi)) / math.log(base)

        low, high = pair(self.fast), pair(self.slow)
        if self.whole:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(rates) - 1)
        span = high - low or 0.001
        ramp = [min(max((i - low) / span, 0.0), 1.0) for i in range(len(rates))]
        return [rate * (1 - part) + rate / self.factor * part for rate, part in zip(rates, ramp, strict=True)]


@dataclass(frozen=True)
class Longrope:
    """Each frequency is divided by a factor of its own, found by search. Ding et al. 2024, "LongRoPE",
    arXiv:2402.13753.

    short, long: the factors, one per pair: `long` applies when `length`, the maximum sequence length, is above
                 `original`; elsewhere the current length decides, see above.
    attention:   factor on queries and keys; None: sqrt(1 + ln(length / original) / ln(original)).
    """

    short: list
    long: list
    original: int
    length: int
    attention: float | None = None

    @property
    def strength(self) -> float:
        if self.attention is not None or self.length <= self.original:
            return self.attention or 1.0
        return math.sqrt(1 + math.log(self.length / self.original) / math.log(self.original))

    def rates(self, rates: tuple[float, ...], base: float) -> list[float]:
        factors = self.long if self.length > self.original else self.short
        if len(factors) != len(rates) or not all(isinstance(x, int | float) and x > 0 for x in factors):
            raise UserError(
                f"longrope needs a number above 0 for each of {len(rates)} pairs of channels, not {factors}"
            )
        return [rate / factor for rate, factor in zip(rates, factors, strict=True)]


SCALINGS = {"linear": Linear, "dynamic": Dynamic, "llama3": Llama3, "yarn": Yarn, "longrope": Longrope}
Scaling = Linear | Dynamic | Llama3 | Yarn | Longrope


def _scaling(table: dict) -> Scaling:
    try:
        kind = table.get("kind")
        if kind not in SCALINGS:
            raise UserError(f"unknown kind '{kind}'{nearest(str(kind), SCALINGS)}")
        given = {key: value for key, value in table.items() if key != "kind"}
        made = SCALINGS[kind](**check_arguments(SCALINGS[kind], given, {}, kind))
        for key in ("factor", "original", "length"):
            if getattr(made, key, 1) <= 0:
                raise UserError(f"{kind}.{key} must be above 0, not {given[key]}")
        return made
    except UserError as error:
        raise error.inside("scaling") from None
