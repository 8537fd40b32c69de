"""How to decode, as a recipe's [decode] or a command line says it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from regard.core import UserError
from regard.schema import fit

from .beam import EARLY_STOPPING, beam
from .result import Hypothesis, Request, Stepper
from .sample import SamplingParams, Seeds, sample
from .speculative import ModelDraft, NgramDraft, speculate

AT_MOST = {"beam": 10_000, "num_return": 10_000, "max_new_tokens": 1 << 17, "speculate": 1 << 10}
STEEPEST = 10.0  # exponent of a length
SAMPLING = ("top_k", "top_p", "min_p")
STRATEGY = ("beam", "num_return", "temperature", *SAMPLING, "repetition_penalty")  # what says how tokens are chosen


@dataclass(frozen=True)
class DecodeConfig:
    """The settings of a recipe's [decode]; greedy search unless they say otherwise.

    beam: the number of hypotheses that beam search keeps; 1 for greedy search or sampling.
    length_penalty: the exponent of the length by which beam search divides a sum of log-probabilities.
    num_return: the number of answers for each input, from beam search.
    early_stopping: when beam search ends. full: as soon as `beam` hypotheses have ended; heuristic: when no open
        hypothesis is more probable than those that have ended; never: when no better hypothesis is possible.
    temperature: above 0 for sampling, the higher the more random; 0 takes the most probable token. A language model
        that was trained here samples with temperature 0.8, top_p 0.95 and seed 1 until one of beam, num_return,
        temperature, top_k, top_p, min_p and repetition_penalty is given.
    top_k: sample from the k most probable tokens; 0 for all.
    top_p: sample from the most probable tokens that together have this probability.
    min_p: sample from tokens with at least this share of the probability of the most probable one.
    repetition_penalty: above 1 to discourage tokens that occurred before, in greedy search and sampling.
    speculate: the number of tokens that are drafted and then verified in one step; the answers stay the same.
    seed: the seed of sampling; a text and a seed decide the answer. Without one, every answer is new.
    max_new_tokens: the most tokens of an answer; 0 for twice the source plus 20, or 200 after a prompt.
    max_source_tokens: the most tokens of an input; 0 for 10,000, or what the model's positions allow.
    truncate: shorten a longer input (a source at its end, a prompt at its beginning) instead of refusing it.
    shortlist: score only target tokens that go with those of the sources: see decode/shortlist.py.
    max_batch_tokens: the positions that are decoded in one batch, all beams counted; 0 for as many as their states
        have room.
    """

    beam: int = 1
    length_penalty: float = 1.0
    num_return: int = 1
    early_stopping: str = "full"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    speculate: int = 0
    seed: int | None = None
    max_new_tokens: int = 0
    max_source_tokens: int = 0
    truncate: bool = False
    shortlist: bool = False
    max_batch_tokens: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("beam", 1),
            ("num_return", 1),
            ("max_new_tokens", 0),
            ("max_source_tokens", 0),
            ("max_batch_tokens", 0),
            ("top_k", 0),
            ("speculate", 0),
        ):
            value = getattr(self, name)
            if value < least:
                raise UserError(f"decode.{name} must be at least {least}, not {value}")
            if value > AT_MOST.get(name, value):
                raise UserError(f"decode.{name} must be at most {AT_MOST[name]:,}, not {value:,}")
        if abs(self.length_penalty) > STEEPEST:
            raise UserError(f"decode.length_penalty must be from {-STEEPEST} to {STEEPEST}, not {self.length_penalty}")
        if self.early_stopping not in EARLY_STOPPING:
            known = f"{', '.join(EARLY_STOPPING[:-1])} or {EARLY_STOPPING[-1]}"
            raise UserError(f"decode.early_stopping must be {known}, not '{self.early_stopping}'")
        if self.temperature < 0 or self.repetition_penalty <= 0 or (self.seed or 0) < 0:
            raise UserError(
                "decode.temperature and decode.seed must not be negative, and decode.repetition_penalty above 0"
            )
        if not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise UserError("decode.top_p must be above 0 and up to 1, and decode.min_p from 0 to 1")
        if self.beam > 1 and (self.draws or self.repetition_penalty != 1):
            raise UserError("beam search takes no temperature and no repetition penalty: for those say decode.beam = 1")
        if self.beam > 1 and self.speculate:
            raise UserError("speculative decoding is for greedy search and sampling: for that say decode.beam = 1")
        if self.shortlist and self.speculate:
            raise UserError(
                "speculative decoding is for language models, and shortlists for translation: give one of them"
            )
        if not self.draws and any(getattr(self, name) != getattr(DecodeConfig, name) for name in SAMPLING):
            raise UserError("top_k, top_p and min_p say how to sample: give decode.temperature as well")
        if self.num_return > self.beam:
            raise UserError(
                f"{self.num_return} answers for each input need a beam of at least {self.num_return}, not {self.beam}"
            )

    @property
    def draws(self) -> bool:
        return self.temperature > 0

    @classmethod
    def read(cls, table: dict[str, Any], base: DecodeConfig | None = None) -> DecodeConfig:
        """From a recipe's [decode] or a command line, unknown keys refused. Where the table is silent, `base` holds,
        unless it speaks of sampling and the table of beam search, or the other way round. `SAMPLED` is left as a whole
        where the table says how tokens are chosen."""
        if not isinstance(table, dict):
            raise UserError(f"[decode] is a table of settings, such as beam = 5, not {table!r}")
        table = fit(cls, table, {}, "decode")
        base = base or cls()
        kept = {field.name: getattr(base, field.name) for field in fields(cls)}
        usual = {name: getattr(SAMPLED, name) for name in ("temperature", "top_p", "seed")}
        if usual.items() <= kept.items() and any(name in table for name in STRATEGY):
            kept |= {name: getattr(cls, name) for name in usual}
        left = ()  # what the table has turned away from
        if table.get("beam", 1) > 1 or table.get("num_return", 1) > 1:
            kept["beam"] = max(base.beam, table.get("num_return", 1))
            left = ("temperature", *SAMPLING, "repetition_penalty")
        elif any(name in table for name in ("beam", "temperature", *SAMPLING, "repetition_penalty")):
            left = ("beam", "num_return") + (SAMPLING if table.get("temperature") == 0 else ())
        return cls(**kept | {name: getattr(cls, name) for name in left} | table)


# Of a language model of which nothing is said: greedy texts soon go round in circles (Holtzman et al. 2020,
# arXiv:1904.09751). The seed makes answers come out the same again.
SAMPLED = DecodeConfig(temperature=0.8, top_p=0.95, seed=1)


def search(
    model: Stepper, request: Request, config: DecodeConfig, seeds: Seeds | None = None, smaller: Stepper | None = None
) -> list[list[Hypothesis]]:
    """The answers for every row of the request, best first. seeds: one for each row, where it samples.
    smaller: a model that drafts tokens, where `config.speculate` says how many; without one, n-grams of the text do."""
    if config.beam > 1:
        return beam(model, request, config.beam, config.length_penalty, config.num_return, config.early_stopping)
    if config.speculate:
        draft = NgramDraft() if smaller is None else ModelDraft(smaller, request.room)
        return [[one] for one in speculate(model, request, draft, config.speculate, sampling(config), seeds)]
    return [[one] for one in sample(model, request, *sampling(config), seeds)]


def sampling(config: DecodeConfig) -> SamplingParams:
    return SamplingParams(config.temperature, config.top_k, config.top_p, config.min_p, config.repetition_penalty)
