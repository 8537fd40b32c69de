"""Fill in what is hidden in a text: an encoder learns from texts of which some tokens are masked.

regard.load("runs/x").predict(["the [MASK] sat on the mat"])[0][0].text
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard import metrics as measures
from regard.core import Model, UserError
from regard.data import Corpus, Lines, Tokenizer, once, prepare_text
from regard.data.batches import Batch
from regard.data.columns import is_labelled, shown
from regard.data.masking import Hide, Masking
from regard.data.masks import NAMES, Pieces, mask_of, reading_masks, with_marks
from regard.decode import DecodeConfig
from regard.parts.objectives.masked import Masked, Noise, measured, token_scores, vectors
from regard.parts.objectives.objective import Objective
from regard.runs.settings import Settings
from regard.schema import check_arguments

from .reader import Reader
from .task import DEV_TOKENS, Say, Task, Tick


class Filled(NamedTuple):
    """One way to fill a text in."""

    text: str
    score: float  # what answers are ranked by: log p of all that was filled in
    tokens: list[str]  # for each mask
    probabilities: list[float]  # of them
    cut: bool = False  # the text was too long, and shortened


def measures_of(noise: Noise) -> tuple[str, ...]:
    """What tells how good a masked model is."""
    return ("loss", "accuracy", "next_sentence") if noise.next_sentence else ("loss", "accuracy")


class Filler(Reader):
    """source: the tokenizer, which has a mask."""

    pairs = False

    def __init__(self, model: Model, source: Tokenizer, target: Tokenizer, folder: Path | None = None, note: str = ""):
        super().__init__(model, source, target, folder, note)
        table = getattr(model, "recipe", {}).get("objective", {})
        self.noise = Noise(
            **check_arguments(Noise, {key: value for key, value in table.items() if key != "part"}, {}, "objective")
        )
        self.metrics = measures_of(self.noise)

    @cached_property
    def mask(self) -> str:
        name = mask_of(self.source)
        if name is None:
            raise UserError("the tokenizer of this run has no mask, so that nothing can be hidden")
        return name

    @cached_property
    def pieces(self) -> Pieces:
        return Pieces(self.source)

    @cached_property
    def closed(self) -> Tensor:
        """(vocab,) True where a token is a mark, or none at all, and never an answer."""
        closed = torch.ones(self.model.vocab, dtype=torch.bool, device=self.device)
        closed[: len(self.pieces.ordinary)] = torch.from_numpy(~self.pieces.ordinary).to(self.device)
        return closed

    def code(self, texts: list[str], config: DecodeConfig, begun: int = 0) -> tuple[list[list[int]], list[bool]]:
        texts = [self._own(text) for text in texts]
        for number, text in enumerate(texts, begun + 1):
            if self.mask not in text:
                raise UserError(f"line {number} hides nothing: say {self.mask} where a word is to be filled in")
        with reading_masks(self.source):
            rows, cut = super().code(texts, config, begun)
        mask = self.source.inner.token_to_id(self.mask)
        for number, (text, row) in enumerate(zip(texts, rows, strict=True), begun + 1):
            if row.count(mask) != text.count(self.mask):
                raise UserError(f"line {number} is longer than what can be taken, and a {self.mask} stands in the rest")
        return rows, cut

    def _own(self, text: str) -> str:
        """With the mask as this tokenizer calls it."""
        for name in NAMES:
            text = text.replace(name, self.mask)
        return text

    @torch.no_grad()
    def respond(self, rows: list[list[int]], config: DecodeConfig) -> Iterator[list[Filled]]:  # type: ignore[override]
        """The `config.num_return` most probable fillings of each text, each mask by itself."""
        tokens, valid = self.padded(rows)
        batch = Batch(tokens, tokens, valid)
        at = tokens == self.source.inner.token_to_id(self.mask)
        scores = token_scores(self.model, *vectors(self.model, batch), at)
        logs = scores.log_softmax(-1).masked_fill(self.closed, -torch.inf)
        values, found = (t.tolist() for t in logs.topk(min(config.num_return, int((~self.closed).sum()))))
        begin = 0
        for count in at.sum(1).tolist():
            end = begin + count
            several = [list(zip(*pair, strict=True)) for pair in zip(found[begin:end], values[begin:end], strict=True)]
            yield [self._filled(chosen, score) for chosen, score in together_best(several, config.num_return)]
            begin = end

    def _filled(self, chosen: list[tuple[int, float]], score: float) -> Filled:
        names = self.source.tokens(token for token, _ in chosen)
        return Filled("", score, names, [float(np.exp(log)) for _, log in chosen])

    def beside(self, text: str, answers: Sequence[Filled]) -> list[Filled]:  # type: ignore[override]
        return [one._replace(text=self._put(self._own(text), one.tokens)) for one in answers]

    def _put(self, text: str, names: list[str]) -> str:
        """Tokens in place of the masks. One that brings its space, or continues a word, comes right after what stands
        before it."""
        whole, *rest = text.split(self.mask)
        for name, after in zip(names, rest, strict=True):
            piece = self.pieces.text(name)
            if self.pieces.spaced or self.pieces.continues(name):
                whole = whole.rstrip()
                piece = piece if whole else piece.lstrip()
            whole += piece + after
        return whole

    def evaluate(self, lines: Iterable[tuple[str, ...]], metrics: Sequence[str]) -> dict[str, Any]:
        """As regard.evaluate tells it: what is hidden is the same every time."""
        measures.check(metrics, self.metrics)
        begun = time.perf_counter()
        rows = list(lines)
        settings = Settings.read(self.model.recipe.get("train", {}))  # type: ignore[union-attr]
        documents = getattr(lines, "documents", True)
        marks = [self.source.end] if documents or not self.source.keeps_lines() else []
        coded = self.source.encode([text for (text,) in rows])
        stream = np.fromiter(chain.from_iterable([*ids, *marks] for ids in coded), np.int64)
        context = min(settings.context_length, self.limit or settings.context_length)
        hide = Hide(self.source, self.noise.share, self.noise.whole_word)
        budget, pairs = max(settings.batch_tokens, context), self.noise.next_sentence
        masking = Masking(stream, self.source, hide, context, budget, settings.seed, pairs, documents, shuffle=False)
        found = measured(self.model, once(masking))  # type: ignore[arg-type]
        told = {"scores": {name: found[name] for name in metrics}, "signatures": {}, "counts": {"examples": len(rows)}}
        return told | {"seconds": {"loss": time.perf_counter() - begun}}


def together_best(several: list[list[tuple[int, float]]], best: int) -> list[tuple[list[tuple[int, float]], float]]:
    """For each mask its likeliest tokens with their log p -> the likeliest fillings of all, with the sum of log p."""
    found: list[tuple[list[tuple[int, float]], float]] = [([], 0.0)]
    for tokens in several:
        longer = [([*chosen, one], score + one[1]) for chosen, score in found for one in tokens]
        found = sorted(longer, key=lambda pair: -pair[1])[:best]
    return found


class MaskedText(Task):
    learns = "masked"
    kind = "encoder"
    predictor = Filler
    reads = "text"
    files = "ids"
    usual = "wordpiece"

    def ask(self, names: Sequence[str]) -> None:
        self.noise = Noise(**check_arguments(Noise, self.own, {}, "objective"))
        self.forced = measures_of(self.noise)  # type: ignore[misc]
        super().ask(names)

    def open(self, tick: Callable[[int], None]) -> Corpus:
        corpus = super().open(tick)
        pick = corpus.train.records.pick
        if pick is not None and self.job.columns is None and is_labelled(pick.names):
            raise UserError(
                f"{corpus.train.name} holds texts with labels ({', '.join(map(shown, pick.names))}), and this recipe "
                f"learns from texts alone: say --task classify to learn the labels, or --columns {pick.taken[0]} to "
                "leave them out"
            )
        return corpus

    def tokenizer(self, corpus: Corpus, kind: str, tick: Tick, *columns: int) -> Tokenizer:
        return with_marks(super().tokenizer(corpus, kind, tick, *columns))

    def fit(self, model: Model) -> None:
        context = self.settings.context_length
        if model.limit is not None and context > model.limit:
            raise UserError(
                f"train.context_length is {context}, and the positions of this model reach only {model.limit}"
            )
        if self.noise.next_sentence and not hasattr(model.head, "pair"):
            raise UserError('objective.next_sentence needs a head that answers for pairs: model.head = "pretrain"')
        if model.head.pools:
            raise UserError('hidden tokens need a head that answers at every position: model.head = "vocabulary"')

    def objective(self) -> Objective:
        return Masked(self.settings.label_smoothing)

    def batches(self, model: Model, corpus: Corpus, say: Say, tick: Tick) -> Any:
        s = self.settings
        budget = s.batch_size * s.context_length if s.batch_size else max(s.batch_tokens, s.context_length)
        return self._masking(corpus.train, "train.ids", budget, True, partial(tick, "preparing"))

    def dev(self, model: Model, lines: Lines) -> Callable[[Model], dict[str, float]]:
        batches = self._masking(lines, "dev.ids", max(self.settings.batch_tokens, DEV_TOKENS), False, lambda done: None)
        return lambda model: measured(model, once(batches))

    def _masking(self, lines: Lines, name: str, budget: int, shuffle: bool, tick: Callable[[int], None]) -> Masking:
        s, noise = self.settings, self.noise
        stream = prepare_text(lines, self.target, self.data(name), tick)
        hide = Hide(self.target, noise.share, noise.whole_word)
        return Masking(
            stream, self.target, hide, s.context_length, budget, s.seed, noise.next_sentence, lines.documents, shuffle
        )
