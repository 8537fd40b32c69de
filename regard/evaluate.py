"""How good a run is on examples with known answers: by teacher forcing (loss, perplexity) and by its own answers.

evaluate(run, corpus.test, ["bleu", "perplexity"])["scores"]["bleu"]
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

import numpy as np
import torch

from regard import metrics as measures
from regard.core import UserError
from regard.data.batches import Batch, Batches, Bucketed, Labelled, once
from regard.label import Labeller
from regard.nodes import NodeLabeller
from regard.run import Run, Way
from regard.train.dev import FORCED, windows
from regard.train.learner import Objective
from regard.train.objectives.classify import Classify
from regard.train.objectives.next_token import NextToken
from regard.train.settings import Settings

KNOWN = (*FORCED, *measures.KNOWN)
BUDGET = 8192  # tokens of a batch

Row = tuple[str, ...]  # source and target, or a text
Tick = Callable[[int], None]


def evaluate(
    run: Run | Labeller | NodeLabeller,
    lines: Iterable[Row],
    metrics: Sequence[str] = ("loss", "perplexity"),
    way: Way | None = None,
    any_reference: bool = False,
    tick: Tick = lambda done: None,
    tokenize: str | None = None,
    lowercase: bool = False,
) -> dict[str, Any]:
    """What can be told as JSON: scores, the signatures of those that have one, counts, and seconds.

    lines:         pairs of source and target, or texts (each a tuple of one); of a graph, some of its nodes.
    way:           how answers are found; None: as the run's recipe says.
    any_reference: where a source stands on several lines, it is answered once and each of its targets is right.
    tick:          called with a number of examples that are done, first for the loss, then for the answers.
    tokenize, lowercase: as in `metrics.measure`.
    """
    if isinstance(run, NodeLabeller):
        return run.evaluate(lines, metrics)  # type: ignore[arg-type]
    measures.check(metrics, KNOWN)
    forced, answered = ([name for name in metrics if (name in FORCED) == kind] for kind in (True, False))
    if answered and not run.pairs:
        raise UserError(f"'{answered[0]}' wants right answers, and a language model has none: say loss or perplexity")
    rows = list(lines)
    if not rows:
        raise UserError("there is nothing to evaluate: the data has no example")
    if any(len(row) != (2 if run.pairs else 1) for row in rows):
        raise UserError(f"this model wants {'pairs of source and target' if run.pairs else 'texts, not pairs'}")
    told: dict[str, Any] = {"scores": {}, "signatures": {}, "counts": {"examples": len(rows)}, "seconds": {}}
    if forced:
        begun = time.perf_counter()
        nll, count, left_out = loss(run, rows, tick)
        values = {"loss": nll / count, "perplexity": math.exp(min(nll / count, 700))}
        told["scores"] |= {name: values[name] for name in forced}
        told["counts"] |= {"tokens": count, "left_out": left_out}
        told["seconds"]["loss"] = time.perf_counter() - begun
    if answered:
        begun = time.perf_counter()
        sources, references = gather(rows, any_reference)
        answers = [found[0] for found in run.answers(sources, way, tick=tick)]
        told["seconds"]["answers"] = time.perf_counter() - begun
        scores = measures.measure(answered, [one.text for one in answers], references, tokenize, lowercase)
        told["scores"] |= {score.name: score.value for score in scores}
        told["signatures"] = {score.name: score.signature for score in scores if score.signature}
        told["counts"] |= {"answers": len(answers), "references": sum(map(len, references))}
        told["counts"] |= {"cut": sum(one.cut for one in answers), "not_ended": sum(not one.ended for one in answers)}
        told["way"] = asdict(way or run.way)
    return told


def gather(lines: Iterable[Row], any_reference: bool, most: int = 0) -> tuple[list[str], list[list[str]]]:
    """Sources and for each the targets that count as right: those of its line, or of all its lines. most: sources; 0:
    all."""
    targets: dict[str | int, list[str]] = {}
    sources: dict[str | int, str] = {}
    for number, (source, target) in enumerate(lines):
        key = source if any_reference else number
        if key not in targets and most and len(targets) == most:
            if not any_reference:
                break
            continue
        sources[key] = source
        targets.setdefault(key, []).append(target)
    return list(sources.values()), list(targets.values())


@torch.no_grad()
def loss(run: Run | Labeller, rows: Sequence[Row], tick: Tick = lambda done: None) -> tuple[float, int, int]:
    """The sum of -log p of the right tokens, their number, and how many examples were too long to be asked."""
    objective: Objective = Classify() if isinstance(run, Labeller) else NextToken()
    nll, count = 0.0, 0
    batches, left_out = _pairs(run, rows, tick) if run.pairs else (_windows(run, rows, tick), 0)
    for batch in batches:
        found = objective(run.model, batch.to(run.device))
        nll, count = nll + float(found.nll), count + found.count
    return nll, count, left_out


class Held:
    """Examples in memory."""

    def __init__(self, rows: list[tuple[np.ndarray, ...]]):
        self.rows = rows
        self.lengths = np.array([[len(side) for side in row] for row in rows])

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        return self.rows[index]


def _pairs(run: Run | Labeller, rows: Sequence[Row], tick: Tick) -> tuple[Iterator[Batch], int]:
    sides = zip((run.source, run.target), zip(*rows, strict=True), strict=True)
    coded = [[np.array([*ids, side.end]) for ids in side.encode(texts)] for side, texts in sides]
    limits = [math.inf if n is None else n for n in (run.model.source_limit, run.model.limit)]
    kept = [pair for pair in zip(*coded, strict=True) if all(len(p) <= n for p, n in zip(pair, limits, strict=True))]
    if not kept:
        raise UserError(f"none of the {len(rows)} examples is short enough for the positions of this model")
    if isinstance(run, Labeller):
        batches: Batches = Labelled(Held(kept), BUDGET, 0, run.source.pad, shuffle=False)
    else:
        batches = Bucketed(Held(kept), BUDGET, 0, run.target.start, run.target.pad, shuffle=False)
    return _ticked(once(batches), tick), len(rows) - len(kept)


def _ticked(batches: Iterator[Batch], tick: Tick) -> Iterator[Batch]:
    for batch in batches:
        yield batch
        tick(len(batch.tokens))


def _windows(run: Run, rows: Sequence[Row], tick: Tick) -> Iterator[Batch]:
    """One long text as in training, in windows of the context that the model was trained with."""
    mark = [run.target.end] if run.marked else []
    coded = run.target.encode([text for (text,) in rows])
    text = np.fromiter(chain.from_iterable([*ids, *mark] for ids in coded), np.int64)
    if not len(text):
        raise UserError("there is nothing to evaluate: the text has no token")
    context = Settings.read(run.model.recipe.get("train", {})).context  # type: ignore[union-attr]
    context = min(context, run.model.limit or context)
    yield from windows(text, run.opening[-1], context, max(BUDGET // context, 1), run.target.pad)
    tick(len(rows))
