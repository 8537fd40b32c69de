"""Fill in the masks of a text: an encoder learns from texts of which some tokens are masked.

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
from regard.data import Corpus, CorpusSplit, Tokenizer, first_epoch, prepare_text
from regard.data.batches import Batch
from regard.data.columns import escaped, has_label_column
from regard.data.masking import MaskedBatches, TokenMasker
from regard.data.masks import MASK_NAMES, Pieces, mask_token, parsing_special_tokens, with_special_tokens
from regard.decode import DecodeConfig
from regard.parts.objectives.masked import Masked, MaskingConfig, hidden_states, masked_metrics, token_logits
from regard.parts.objectives.objective import Objective
from regard.runs.settings import Settings
from regard.schema import check_arguments

from .reader import Reader
from .task import DEV_TOKENS, Say, Task, Tick


class Filled(NamedTuple):
    """One way to fill a text in."""

    text: str
    score: float  # log p of all filled-in tokens, by which answers are ranked
    tokens: list[str]  # for each mask
    probabilities: list[float]  # of them
    cut: bool = False  # whether the text was too long and truncated


def metrics_for(noise: MaskingConfig) -> tuple[str, ...]:
    """Return the metrics of a masked language model."""
    return ("loss", "accuracy", "next_sentence") if noise.next_sentence else ("loss", "accuracy")


class Filler(Reader):
    """Fills in the masks of texts. source: a tokenizer with a mask token."""

    pairs = False

    def __init__(self, model: Model, source: Tokenizer, target: Tokenizer, folder: Path | None = None, note: str = ""):
        super().__init__(model, source, target, folder, note)
        table = getattr(model, "recipe", {}).get("objective", {})
        self.noise = MaskingConfig(
            **check_arguments(
                MaskingConfig, {key: value for key, value in table.items() if key != "part"}, {}, "objective"
            )
        )
        self.metrics = metrics_for(self.noise)

    @cached_property
    def mask(self) -> str:
        name = mask_token(self.source)
        if name is None:
            raise UserError("the tokenizer of this run has no mask token, so nothing can be filled in")
        return name

    @cached_property
    def pieces(self) -> Pieces:
        return Pieces(self.source)

    @cached_property
    def never_filled(self) -> Tensor:
        """Return which ids are never an answer, (vocab,): special tokens and unused ids."""
        never_filled = torch.ones(self.model.vocab, dtype=torch.bool, device=self.device)
        never_filled[: len(self.pieces.ordinary)] = torch.from_numpy(~self.pieces.ordinary).to(self.device)
        return never_filled

    def encode_inputs(
        self, texts: list[str], config: DecodeConfig, lines_before: int = 0
    ) -> tuple[list[list[int]], list[bool]]:
        texts = [self._with_own_mask(text) for text in texts]
        for number, text in enumerate(texts, lines_before + 1):
            if self.mask not in text:
                raise UserError(f"line {number} has no mask: write {self.mask} where a word is to be filled in")
        with parsing_special_tokens(self.source):
            rows, cut = super().encode_inputs(texts, config, lines_before)
        mask = self.source.inner.token_to_id(self.mask)
        for number, (text, row) in enumerate(zip(texts, rows, strict=True), lines_before + 1):
            if row.count(mask) != text.count(self.mask):
                raise UserError(f"line {number} is too long, and truncating it would remove a {self.mask}")
        return rows, cut

    def _with_own_mask(self, text: str) -> str:
        """Return a text with every usual name of the mask replaced by the mask token of this tokenizer."""
        for name in MASK_NAMES:
            text = text.replace(name, self.mask)
        return text

    @torch.no_grad()
    def predict_rows(self, rows: list[list[int]], config: DecodeConfig) -> Iterator[list[Filled]]:  # type: ignore[override]
        """Yield the `config.num_return` most probable fillings of each text; masks are filled independently."""
        tokens, valid = self.padded(rows)
        batch = Batch(tokens, tokens, valid)
        at = tokens == self.source.inner.token_to_id(self.mask)
        scores = token_logits(self.model, *hidden_states(self.model, batch), at)
        logs = scores.log_softmax(-1).masked_fill(self.never_filled, -torch.inf)
        values, found = (t.tolist() for t in logs.topk(min(config.num_return, int((~self.never_filled).sum()))))
        begin = 0
        for count in at.sum(1).tolist():
            end = begin + count
            several = [list(zip(*pair, strict=True)) for pair in zip(found[begin:end], values[begin:end], strict=True)]
            yield [self._filled(chosen, score) for chosen, score in best_combinations(several, config.num_return)]
            begin = end

    def _filled(self, chosen: list[tuple[int, float]], score: float) -> Filled:
        names = self.source.tokens(token for token, _ in chosen)
        return Filled("", score, names, [float(np.exp(log)) for _, log in chosen])

    def complete_answers(self, text: str, answers: Sequence[Filled]) -> list[Filled]:  # type: ignore[override]
        return [one._replace(text=self._fill_masks(self._with_own_mask(text), one.tokens)) for one in answers]

    def _fill_masks(self, text: str, names: list[str]) -> str:
        """Return the text with tokens in place of the masks. A token that includes its space, or continues a word,
        follows the text before it directly."""
        whole, *rest = text.split(self.mask)
        for name, after in zip(names, rest, strict=True):
            piece = self.pieces.text(name)
            if self.pieces.spaced or self.pieces.continues(name):
                whole = whole.rstrip()
                piece = piece if whole else piece.lstrip()
            whole += piece + after
        return whole

    def evaluate(self, lines: Iterable[tuple[str, ...]], metrics: Sequence[str]) -> dict[str, Any]:
        """Return the result of regard.evaluate. The same tokens are masked every time."""
        measures.check(metrics, self.metrics)
        begun = time.perf_counter()
        rows = list(lines)
        settings = Settings.read(self.model.recipe.get("train", {}))  # type: ignore[union-attr]
        documents = getattr(lines, "documents", True)
        marks = [self.source.end] if documents or not self.source.keeps_newlines() else []
        coded = self.source.encode([text for (text,) in rows])
        stream = np.fromiter(chain.from_iterable([*ids, *marks] for ids in coded), np.int64)
        context = min(settings.context_length, self.limit or settings.context_length)
        masker = TokenMasker(self.source, self.noise.share, self.noise.whole_word)
        budget, pairs = max(settings.batch_tokens, context), self.noise.next_sentence
        masking = MaskedBatches(
            stream, self.source, masker, context, budget, settings.seed, pairs, documents, shuffle=False
        )
        found = masked_metrics(self.model, first_epoch(masking))  # type: ignore[arg-type]
        result = {
            "scores": {name: found[name] for name in metrics},
            "signatures": {},
            "counts": {"examples": len(rows)},
        }
        return result | {"seconds": {"loss": time.perf_counter() - begun}}


def best_combinations(several: list[list[tuple[int, float]]], best: int) -> list[tuple[list[tuple[int, float]], float]]:
    """Return the most likely combinations of one token per mask, with the sums of their log p. several: for each mask
    its most likely tokens and their log p."""
    found: list[tuple[list[tuple[int, float]], float]] = [([], 0.0)]
    for tokens in several:
        longer = [([*chosen, one], score + one[1]) for chosen, score in found for one in tokens]
        found = sorted(longer, key=lambda pair: -pair[1])[:best]
    return found


class MaskedText(Task):
    objective_name = "masked"
    kind = "encoder"
    predictor = Filler
    reads = "text"
    file_suffix = "ids"
    default_tokenizer = "wordpiece"

    def set_metrics(self, names: Sequence[str]) -> None:
        self.noise = MaskingConfig(**check_arguments(MaskingConfig, self.objective_args, {}, "objective"))
        self.loss_metrics = metrics_for(self.noise)  # type: ignore[misc]
        super().set_metrics(names)

    def open(self, tick: Callable[[int], None]) -> Corpus:
        corpus = super().open(tick)
        pick = corpus.train.records.pick
        if pick is not None and self.job.columns is None and has_label_column(pick.names):
            raise UserError(
                f"{corpus.train.name} holds texts with labels ({', '.join(map(escaped, pick.names))}), and this recipe "
                f"learns from texts alone: say --task classify to learn the labels, or --columns {pick.selected[0]} to "
                "leave them out"
            )
        return corpus

    def tokenizer(self, corpus: Corpus, kind: str, tick: Tick, *columns: int) -> Tokenizer:
        return with_special_tokens(super().tokenizer(corpus, kind, tick, *columns))

    def check_model(self, model: Model) -> None:
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

    def dev(self, model: Model, lines: CorpusSplit) -> Callable[[Model], dict[str, float]]:
        batches = self._masking(lines, "dev.ids", max(self.settings.batch_tokens, DEV_TOKENS), False, lambda done: None)
        return lambda model: masked_metrics(model, first_epoch(batches))

    def _masking(
        self, lines: CorpusSplit, name: str, budget: int, shuffle: bool, tick: Callable[[int], None]
    ) -> MaskedBatches:
        s, noise = self.settings, self.noise
        stream = prepare_text(lines, self.target, self.data_path(name), tick)
        masker = TokenMasker(self.target, noise.share, noise.whole_word)
        return MaskedBatches(
            stream, self.target, masker, s.context_length, budget, s.seed, noise.next_sentence, lines.documents, shuffle
        )
