"""The settings of decoding, from a recipe's [decode] or the command line."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from regard.core import UserError
from regard.errors import nearest
from regard.schema import check_arguments

from .beam import EARLY_STOPPING, beam
from .result import Hypothesis, Request, Stepper
from .sample import SamplingParams, Seeds, sample
from .speculative import ModelDraft, NgramDraft, speculate

MAXIMA = {
    "beam": 10_000, "num_return": 10_000, "max_new_tokens": 1 << 17, "speculate": 1 << 10, "iterations": 10_000,
    "length_beam": 1_000,
}  # fmt: skip
STRATEGIES = ("ctc", "edit", "lookahead", "mask_predict", "parallel", "viterbi")  # of decoders that write all at once
MAX_LENGTH_PENALTY = 10.0  # the largest exponent of the length
SAMPLING = ("top_k", "top_p", "min_p")
STRATEGY = ("beam", "num_return", "temperature", *SAMPLING, "repetition_penalty")  # the settings that choose a strategy


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
    strategy: how a decoder that writes all tokens at once is asked: parallel, mask_predict, edit, viterbi, lookahead or
        ctc; nothing for the one that its head needs, or parallel.
    iterations: the most passes of mask_predict and edit.
    length_beam: the number of lengths that such a decoder tries side by side.
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
    strategy: str = ""
    iterations: int = 10
    length_beam: int = 1
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
            ("iterations", 1),
            ("length_beam", 1),
        ):
            value = getattr(self, name)
            if value < least:
                raise UserError(f"decode.{name} must be at least {least}, not {value}")
            if value > MAXIMA.get(name, value):
                raise UserError(f"decode.{name} must be at most {MAXIMA[name]:,}, not {value:,}")
        if self.strategy and self.strategy not in STRATEGIES:
            raise UserError(f"unknown decode.strategy '{self.strategy}'{nearest(self.strategy, STRATEGIES)}")
        if abs(self.length_penalty) > MAX_LENGTH_PENALTY:
            raise UserError(
                f"decode.length_penalty must be from {-MAX_LENGTH_PENALTY} to {MAX_LENGTH_PENALTY}, "
                f"not {self.length_penalty}"
            )
        if self.early_stopping not in EARLY_STOPPING:
            choices = f"{', '.join(EARLY_STOPPING[:-1])} or {EARLY_STOPPING[-1]}"
            raise UserError(f"decode.early_stopping must be {choices}, not '{self.early_stopping}'")
        if self.temperature < 0 or self.repetition_penalty <= 0 or (self.seed or 0) < 0:
            raise UserError(
                "decode.temperature and decode.seed must not be negative, and decode.repetition_penalty above 0"
            )
        if not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise UserError("decode.top_p must be above 0 and up to 1, and decode.min_p from 0 to 1")
        if self.beam > 1 and (self.samples or self.repetition_penalty != 1):
            raise UserError("beam search takes no temperature and no repetition penalty: for those say decode.beam = 1")
        if self.beam > 1 and self.speculate:
            raise UserError("speculative decoding is for greedy search and sampling: for that say decode.beam = 1")
        if self.shortlist and self.speculate:
            raise UserError(
                "speculative decoding is for language models, and shortlists for translation: give one of them"
            )
        if not self.samples and any(getattr(self, name) != getattr(DecodeConfig, name) for name in SAMPLING):
            raise UserError("top_k, top_p and min_p say how to sample: give decode.temperature as well")
        if self.num_return > max(self.beam, self.length_beam):
            raise UserError(
                f"{self.num_return} answers for each input need a beam of at least {self.num_return}, not {self.beam}"
            )

    @property
    def samples(self) -> bool:
        return self.temperature > 0

    @classmethod
    def read(cls, table: dict[str, Any], base: DecodeConfig | None = None) -> DecodeConfig:
        """Read a recipe's [decode] or the settings of a command line; unknown keys are refused. `base` gives the other
        settings, except that a table for beam search drops those for sampling, and the other way round. A `base` of
        DEFAULT_SAMPLING is dropped as a whole where the table chooses a strategy."""
        if not isinstance(table, dict):
            raise UserError(f"[decode] is a table of settings, such as beam = 5, not {table!r}")
        table = check_arguments(cls, table, {}, "decode")
        base = base or cls()
        kept = {field.name: getattr(base, field.name) for field in fields(cls)}
        default = {name: getattr(DEFAULT_SAMPLING, name) for name in ("temperature", "top_p", "seed")}
        if default.items() <= kept.items() and any(name in table for name in STRATEGY):
            kept |= {name: getattr(cls, name) for name in default}
        dropped = ()  # settings of the other strategy
        if base.strategy:  # of a decoder that writes all at once, whose answers differ in their lengths
            return cls(**kept | table)
        if table.get("beam", 1) > 1 or table.get("num_return", 1) > 1:
            kept["beam"] = max(base.beam, table.get("num_return", 1))
            dropped = ("temperature", *SAMPLING, "repetition_penalty")
        elif any(name in table for name in ("beam", "temperature", *SAMPLING, "repetition_penalty")):
            dropped = ("beam", "num_return") + (SAMPLING if table.get("temperature") == 0 else ())
        return cls(**kept | {name: getattr(cls, name) for name in dropped} | table)


# For a language model without settings: greedy texts soon repeat themselves (Holtzman et al. 2020, arXiv:1904.09751).
# The seed makes answers reproducible.
DEFAULT_SAMPLING = DecodeConfig(temperature=0.8, top_p=0.95, seed=1)


def search(
    model: Stepper,
    request: Request,
    config: DecodeConfig,
    seeds: Seeds | None = None,
    draft_model: Stepper | None = None,
) -> list[list[Hypothesis]]:
    """Return the answers for every row of the request, best first.

    seeds: one for each row, for sampling.
    draft_model: drafts `config.speculate` tokens at a time; without one, n-grams of the text do.
    """
    if config.beam > 1:
        return beam(model, request, config.beam, config.length_penalty, config.num_return, config.early_stopping)
    if config.speculate:
        draft = NgramDraft() if draft_model is None else ModelDraft(draft_model, request.capacity)
        return [[one] for one in speculate(model, request, draft, config.speculate, sampling(config), seeds)]
    return [[one] for one in sample(model, request, *sampling(config), seeds)]


def sampling(config: DecodeConfig) -> SamplingParams:
    return SamplingParams(config.temperature, config.top_k, config.top_p, config.min_p, config.repetition_penalty)
