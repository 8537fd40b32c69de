"""Embed texts: an encoder maps texts of similar meaning to nearby vectors.

run.embed(["a cat", "a kitten"])         # (2, width)
Embedder.of(run).cosines([("a cat", "a kitten")])
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard import metrics as measures
from regard.bases.pooling import check_pool, pool
from regard.core import Context, UserError
from regard.decode import DecodeConfig, Ensemble
from regard.errors import short

from .reader import Reader, batch_by_length
from .run import READ_AHEAD
from .task import Task

KINDS = ("encoder", "encoder-decoder")


class Embedded(NamedTuple):
    """The vector of a text, or the cosine similarity of two texts."""

    vector: list[float] | None = None
    cosine: float | None = None
    cut: bool = False  # whether the text was too long and truncated

    @property
    def text(self) -> str:
        """Return the result as a line of text."""
        return json.dumps(self.vector) if self.cosine is None else f"{self.cosine:.4f}"


class Embedder(Reader):
    """Embeds texts.

    pool:       how the vectors of tokens become one: mean, first, last, max; None: as the model's head says, else mean.
    normalize:  scale vectors to length 1; None: as the head says, else not.
    similarity: an input is two texts with a tab between, and the answer is the cosine of their vectors.
    """

    reads = "matches"
    options = ("truncate", "pool", "normalize", "similarity", "out")
    metrics = ("pearson", "spearman")
    pool: str | None = None
    normalize: bool | None = None
    similarity: bool = False

    @classmethod
    def of(cls, run: Any) -> Embedder:
        """Return the embedder of a run whose model encodes texts."""
        if isinstance(run, cls):
            return run
        kind = getattr(run.model, "kind", "")
        if kind not in KINDS or run.takes != "texts" or getattr(run, "source", None) is None:
            raise UserError("vectors of texts come of an encoder that reads texts, and this model is none")
        if isinstance(run.model, Ensemble):
            raise UserError("vectors are those of one model: ask it alone")
        made = cls(run.model, run.source, run.target, run.folder, run.note)
        made.config = run.config
        return made

    @property
    def limit(self) -> int | None:
        return self.model.source_limit if self.model.kind == "encoder-decoder" else self.model.limit

    def embed(self, texts: Sequence[str], pool: str | None = None, normalize: bool | None = None) -> Tensor:
        """Return the vectors of texts, (texts, width)."""
        if isinstance(texts, str):
            raise UserError("texts come in a list: for a single one, say [text]")
        rows, _ = self.encode_inputs(list(texts), self.config)
        return self._vectors(rows, pool, normalize)

    def cosines(self, pairs: Sequence[tuple[str, str]]) -> Tensor:
        """Return the cosine similarities of pairs of texts, (pairs,), from -1 to 1."""
        return self._cosines(*(self.encode_inputs(list(side), self.config)[0] for side in zip(*pairs, strict=True)))

    def _cosines(self, ones: list[list[int]], others: list[list[int]]) -> Tensor:
        vectors = self._vectors([*ones, *others], None, True)
        return (vectors[: len(ones)] * vectors[len(ones) :]).sum(-1)

    @torch.no_grad()
    def _vectors(self, rows: list[list[int]], pool: str | None, normalize: bool | None) -> Tensor:
        """Return the vectors of rows of token ids, (rows, width), computed in batches of similar length."""
        how, normalize = self._how(pool, normalize)
        found: Tensor | None = None
        for numbers in batch_by_length([len(row) for row in rows], self.budget):
            some = self._pooled(*self.padded([rows[i] for i in numbers]), how)
            some = F.normalize(some, dim=-1) if normalize else some
            found = some.new_empty(len(rows), some.shape[-1], device="cpu") if found is None else found
            found[numbers] = some.cpu()
        return torch.empty(0, self.model.width) if found is None else found

    def _how(self, how: str | None, normalize: bool | None) -> tuple[str, bool]:
        head = self.model.head
        says = hasattr(head, "normalize")  # a head that was made for embeddings
        how = how or self.pool or (head.pool if says else "mean")  # type: ignore[assignment]
        normalize = self.normalize if normalize is None else normalize
        return check_pool(how), bool(head.normalize) if normalize is None and says else bool(normalize)  # type: ignore[arg-type]

    def _pooled(self, tokens: Tensor, valid: Tensor | None, how: str) -> Tensor:
        """Return the pooled hidden states, (batch, width)."""
        context = Context.begin(*tokens.shape, tokens.device, valid=valid)
        if self.model.kind == "encoder-decoder":
            return pool(self.model.encode(tokens, valid).x, context, how)
        return pool(self.model.hidden(tokens, context), context, how)

    def answers(  # type: ignore[override]
        self,
        texts: Iterable[str],
        config: DecodeConfig | None = None,
        attention: bool = False,
        read_ahead: int = READ_AHEAD,
        tick: Callable[[int], None] = lambda done: None,
    ) -> Iterator[list[Embedded]]:
        for found, cut in self._blocks(texts, config or self.config, read_ahead):
            for value, one in zip(found.tolist(), cut, strict=True):
                if self.similarity:
                    yield [Embedded(cosine=value, cut=one)]
                else:
                    yield [Embedded([float(f"{number:.7g}") for number in value], cut=one)]
            tick(len(cut))

    def _blocks(
        self, texts: Iterable[str], config: DecodeConfig, read_ahead: int
    ) -> Iterator[tuple[Tensor, list[bool]]]:
        """Yield for `read_ahead` texts at a time their vectors (texts, width), or the cosines of pairs (pairs,), and
        which were truncated."""
        source, lines_before = iter(texts), 0
        while some := list(islice(source, read_ahead)):
            if self.similarity:
                sides = [self.encode_inputs(side, config, lines_before) for side in self._sides(some, lines_before)]
                yield (
                    self._cosines(*(rows for rows, _ in sides)),
                    [any(cut) for cut in zip(*(cut for _, cut in sides), strict=True)],
                )
            else:
                rows, cut = self.encode_inputs(some, config, lines_before)
                yield self._vectors(rows, None, None), cut
            lines_before += len(some)

    def _sides(self, lines: list[str], lines_before: int) -> list[list[str]]:
        """Return the first texts of all lines, and the second ones."""
        pairs = [line.split("\t") for line in lines]
        for number, pair in enumerate(pairs, lines_before + 1):
            if len(pair) != 2:
                raise UserError(f"line {number} has {len(pair)} texts: two with a tab between are compared")
        return [list(side) for side in zip(*pairs, strict=True)]

    def evaluate(self, lines: Iterable[tuple[str, ...]], metrics: Sequence[str]) -> dict[str, Any]:
        """Return the result of regard.evaluate on pairs of texts with a similarity: its correlations with the
        cosines."""
        measures.check(metrics, self.metrics)
        rows, begun = list(lines), time.perf_counter()
        if not rows:
            raise UserError("there is nothing to evaluate: the data has no example")
        ones, others, right = ([*side] for side in zip(*rows, strict=True))
        found = self.cosines(list(zip(ones, others, strict=True))).tolist()
        took = time.perf_counter() - begun
        scores = measures.measure(metrics, [str(one) for one in found], [[number] for number in right])
        result = {"scores": {score.name: score.value for score in scores}, "signatures": {}}
        return result | {"counts": {"examples": len(rows)}, "seconds": {"answers": took}}

    def save(self, texts: Iterable[str], path: Path, config: DecodeConfig | None = None) -> None:
        """Save all vectors, (texts, width), or cosines, (pairs,), as a NumPy file, written to a temporary name and
        renamed."""
        if path.suffix != ".npy":
            raise UserError(
                f"vectors are written to a NumPy file: {short(path.with_suffix('.npy'))}, not {short(path)}"
            )
        blocks = [found.float().numpy() for found, _ in self._blocks(texts, config or self.config, READ_AHEAD)]
        part = path.with_name(path.name + ".part")
        try:
            with open(part, "wb") as file:
                np.save(file, np.concatenate(blocks) if blocks else np.zeros((0, self.model.width), np.float32))
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise UserError(f"{short(path)} cannot be written: {error.strerror}") from None


class Embeddings(Task):
    """The task of embedding texts. Such models are converted, not trained here."""

    objective_name = "embed"
    trainable = False
    predictor = Embedder
