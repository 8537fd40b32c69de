"""Rotary positions: each pair of channels of a query and a key is turned by an angle that grows with the place, so
that their dot product knows only how far apart they are.

    (q_2i, q_2i+1) at place n  ->  turned by n w_i,      w_i = base^(-2i/dim)

Su et al. 2021, "RoFormer", arXiv:2104.09864. A model trained on short sequences reads longer ones when the turning is
slowed down: the scalings below. None of them may look at the length of the sequence at hand, as "dynamic" and
"longrope" do elsewhere: keys that are cached would have been turned at another speed than those of a longer sequence,
and the output would depend on how it was cut. Here the length is declared once.
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
    """layout: "halves": channel i turns with channel i + dim/2 (Llama, NeoX); "interleaved": neighbours (paper, GPT-J).
    base:      of the geometric series of speeds.
    fraction:  of a head's channels that are turned, the first ones; the others know no place (NeoX 0.25).
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
        self.layout, self.turned = layout, int(dim * fraction)
        if not 2 <= self.turned <= dim or self.turned % 2:
            raise UserError(
                f"rotary positions turn an even number of channels, and fraction {fraction} of dim {dim} is "
                f"{self.turned}: change one of them"
            )
        self.rates, self.strength = frequencies(self.turned, base), 1.0
        if scaling is not None:
            slowed = _scaling(scaling)
            self.rates, self.strength = tuple(slowed.rates(self.rates, base)), slowed.strength

    def waves(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each (..., pairs), for places (...)."""
        angle = angles(at, self.rates)
        return angle.cos() * self.strength, angle.sin() * self.strength

    def query(self, q: Tensor, at: Tensor) -> Tensor:
        return self._turn(q, at)

    def key(self, k: Tensor, at: Tensor) -> Tensor:
        return self._turn(k, at)

    def rotary_tables(self, context: Context, dtype: torch.dtype) -> RotaryTables:
        halves = self.layout == "halves"

        def find() -> RotaryTables:
            at = context.positions[:1] if context.last_position == int(context.positions.min()) else context.positions
            cos, sin = (wave.to(dtype).contiguous() for wave in self.waves(at[:, 0]))
            return RotaryTables(cos, sin, halves)

        return context.cached(("spin", self.rates, self.strength, halves, dtype), find)

    def _turn(self, x: Tensor, at: Tensor) -> Tensor:
        cos, sin = (wave[:, None].to(x.dtype) for wave in self.waves(at))  # (batch or 1, 1, time, pairs)
        if self.turned == x.shape[-1]:
            return rotate(x, cos, sin, self.layout)
        return cat((rotate(x[..., : self.turned], cos, sin, self.layout), x[..., self.turned :]), -1)


@dataclass(frozen=True)
class Linear:
    """All speeds divided by `factor`. Chen et al. 2023, arXiv:2306.15595."""

    factor: float
    strength = 1.0

    def rates(self, rates: tuple[float, ...], base: float) -> list[float]:
        return [rate / self.factor for rate in rates]


@dataclass(frozen=True)
class Dynamic:
    """The base grows, so that the slowest pair slows most and the fastest not at all ("NTK-aware").

    length:   the longest sequence that will come; elsewhere it is the current one, see above. Up to `original`, nothing
              changes.
    original: the length of training.
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
    """Waves that fit fewer than `low` times into `original` places are slowed by `factor`, those that fit `high` times
    are left alone, and between them it goes smoothly. Llama 3.1, arXiv:2407.21783."""

    factor: float
    original: int
    low: float = 1.0
    high: float = 4.0
    strength = 1.0

    def __post_init__(self) -> None:
        if self.high <= self.low:
            raise UserError(f"llama3 needs high above low, not {self.high} and {self.low}")

    def rates(self, rates: tuple[float, ...], base: float) -> list[float]:
        def slowed(rate: float) -> float:
            fits = self.original * rate / (2 * math.pi)
            kept = min(max((fits - self.low) / (self.high - self.low), 0.0), 1.0)
            return kept * rate + (1 - kept) * rate / self.factor

        return [slowed(rate) for rate in rates]


@dataclass(frozen=True)
class Yarn:
    """As llama3, with a ramp that is straight in the number of the pair, and sharper attention. Peng et al. 2023,
    "YaRN", arXiv:2309.00071.

    fast, slow: pairs that turn more than `fast` times in `original` places are left alone, fewer than `slow` slowed.
    attention:  multiplies queries and keys; None: 0.1 ln(factor) + 1.
    whole:      the ramp begins and ends at whole pairs.
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
    """Each pair is slowed by a number of its own, found by search. Ding et al. 2024, "LongRoPE", arXiv:2402.13753.

    short, long: the numbers, one for each pair: `long` is taken when `length`, the longest sequence that will come, is
                 above `original`; elsewhere the current sequence decides, see above.
    attention:   multiplies queries and keys; None: sqrt(1 + ln(length / original) / ln(original)).
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
        slower = self.long if self.length > self.original else self.short
        if len(slower) != len(rates) or not all(isinstance(by, int | float) and by > 0 for by in slower):
            raise UserError(f"longrope needs a number above 0 for each of {len(rates)} pairs of channels, not {slower}")
        return [rate / by for rate, by in zip(rates, slower, strict=True)]


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
