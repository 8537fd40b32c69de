"""How to decode, as a recipe's [decode] or a command line says it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from regard.core import UserError
from regard.core.parts import fit

from .beam import STOPS, beam
from .result import Hypothesis, Request, Stepper
from .sample import Knobs, Seeds, sample
from .speculative import Before, Smaller, speculate

MOST = {"beam": 10_000, "best": 10_000, "most": 1 << 17, "guess": 1 << 10}  # beyond these, an answer never comes
STEEPEST = 10.0  # exponent of a length
DRAWN = ("top_k", "top_p", "min_p")  # what says how to draw
CHOICE = ("beam", "best", "temperature", *DRAWN, "repetition")  # what says how tokens are chosen


@dataclass(frozen=True)
class Way:
    """Greedy, unless said otherwise.

    beam:        beginnings that beam search keeps; 1 for none.
    penalty:     of the length, in beam search: the exponent by which a sum of log p is divided.
    best:        answers for each input, from beam search.
    stop:        when a beam search is over: "likely": no beginning is likelier than the answers that have ended;
                 "full": `beam` answers have ended; "sure": nothing better can come.
    temperature: above 0: draw at random, the higher the wilder; 0: take the most probable token. A language model that
                 was trained here draws with temperature 0.8, top_p 0.95 and seed 1, until one of beam, best,
                 temperature, top_k, top_p, min_p and repetition is given.
    top_k:       draw from the k most probable tokens; 0: from all.
    top_p:       draw from the most probable tokens that together have this probability.
    min_p:       draw from tokens that have at least this share of the probability of the most probable one.
    repetition:  above 1: discourage tokens that were there before; greedy and sampling.
    guess:       above 0: so many tokens are guessed at a time, and read in one step; the answers stay the same.
    seed:        of what is drawn; a text and a seed decide the answer. Without one, every answer is new.
    most:        new tokens at the most; 0: twice the source and 20 more, or 200 after a prompt.
    longest:     tokens of an input; 0: 10,000, or what the model's positions allow.
    cut:         shorten a longer input (a source at its end, a prompt at its beginning) instead of refusing it.
    shortlist:   score only target tokens that go with those of the sources: see decode/shortlist.py.
    tokens:      positions that are worked on side by side, all beams counted; 0: as many as their states have room.
    """

    beam: int = 1
    penalty: float = 1.0
    best: int = 1
    stop: str = "full"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    guess: int = 0
    seed: int | None = None
    most: int = 0
    longest: int = 0
    cut: bool = False
    shortlist: bool = False
    tokens: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("beam", 1),
            ("best", 1),
            ("most", 0),
            ("longest", 0),
            ("tokens", 0),
            ("top_k", 0),
            ("guess", 0),
        ):
            if getattr(self, name) < least:
                raise UserError(f"decode.{name} must be at least {least}, not {getattr(self, name)}")
            if getattr(self, name) > MOST.get(name, getattr(self, name)):
                raise UserError(f"decode.{name} must be at most {MOST[name]:,}, not {getattr(self, name):,}")
        if abs(self.penalty) > STEEPEST:
            raise UserError(f"decode.penalty must be from {-STEEPEST} to {STEEPEST}, not {self.penalty}")
        if self.stop not in STOPS:
            raise UserError(f"decode.stop must be {STOPS[0]}, {STOPS[1]} or {STOPS[2]}, not '{self.stop}'")
        if self.temperature < 0 or self.repetition <= 0 or (self.seed or 0) < 0:
            raise UserError("decode.temperature and decode.seed must not be negative, and decode.repetition above 0")
        if not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise UserError("decode.top_p must be above 0 and up to 1, and decode.min_p from 0 to 1")
        if self.beam > 1 and (self.draws or self.repetition != 1):
            raise UserError("beam search takes no temperature and no repetition penalty: for those say decode.beam = 1")
        if self.beam > 1 and self.guess:
            raise UserError("beam search reads no guesses: for those say decode.beam = 1")
        if self.shortlist and self.guess:
            raise UserError("guesses are for language models, and shortlists for translation: give one of them")
        if not self.draws and any(getattr(self, name) != getattr(Way, name) for name in DRAWN):
            raise UserError("top_k, top_p and min_p say how to draw at random: give decode.temperature as well")
        if self.best > self.beam:
            raise UserError(f"{self.best} answers for each input need a beam of at least {self.best}, not {self.beam}")

    @property
    def draws(self) -> bool:
        return self.temperature > 0

    @classmethod
    def read(cls, table: dict[str, Any], base: Way | None = None) -> Way:
        """From a recipe's [decode] or a command line, unknown keys refused. Where the table is silent, `base` holds,
        unless it speaks of sampling and the table of beam search, or the other way round. `SAMPLED` is left as a whole
        where the table says how tokens are chosen."""
        if not isinstance(table, dict):
            raise UserError(f"[decode] is a table of settings, such as beam = 5, not {table!r}")
        table = fit(cls, table, {}, "decode")
        base = base or cls()
        kept = {field.name: getattr(base, field.name) for field in fields(cls)}
        usual = {name: getattr(SAMPLED, name) for name in ("temperature", "top_p", "seed")}
        if usual.items() <= kept.items() and any(name in table for name in CHOICE):
            kept |= {name: getattr(cls, name) for name in usual}
        left = ()  # what the table has turned away from
        if table.get("beam", 1) > 1 or table.get("best", 1) > 1:
            kept["beam"] = max(base.beam, table.get("best", 1))
            left = ("temperature", *DRAWN, "repetition")
        elif any(name in table for name in ("beam", "temperature", *DRAWN, "repetition")):
            left = ("beam", "best") + (DRAWN if table.get("temperature") == 0 else ())
        return cls(**kept | {name: getattr(cls, name) for name in left} | table)


# Of a language model of which nothing is said: greedy texts soon go round in circles (Holtzman et al. 2020,
# arXiv:1904.09751). The seed makes answers come out the same again.
SAMPLED = Way(temperature=0.8, top_p=0.95, seed=1)


def search(
    model: Stepper, request: Request, way: Way, seeds: Seeds | None = None, smaller: Stepper | None = None
) -> list[list[Hypothesis]]:
    """The answers for every row of the request, best first. seeds: one for each row, where the way draws. smaller: a
    model that guesses, where the way says how many tokens; without one, what was said before does."""
    if way.beam > 1:
        return beam(model, request, way.beam, way.penalty, way.best, way.stop)
    if way.guess:
        draft = Before() if smaller is None else Smaller(smaller, request.room)
        return [[one] for one in speculate(model, request, draft, way.guess, knobs(way), seeds)]
    return [[one] for one in sample(model, request, *knobs(way), seeds)]


def knobs(way: Way) -> Knobs:
    return Knobs(way.temperature, way.top_k, way.top_p, way.min_p, way.repetition)
