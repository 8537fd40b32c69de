"""Evaluate a run on examples with known answers: by teacher forcing (loss, perplexity) and by its own answers.

evaluate(run, corpus.test, ["bleu", "perplexity"])["scores"]["bleu"]
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import chain
from typing import Any

import numpy as np
import torch

from regard import metrics as measures
from regard.core import UserError
from regard.data import KINDS
from regard.data.batches import Batch, Batches, BucketedBatches, first_epoch
from regard.data.columns import quoted_list
from regard.data.streams import eval_streams
from regard.decode import DecodeConfig
from regard.errors import shown
from regard.parts.objectives.next_token import NextToken
from regard.parts.objectives.objective import Objective
from regard.parts.objectives.segments import Segments, memory_length
from regard.runs.settings import Settings
from regard.tasks.dev import LOSS_METRICS, group_references, windows
from regard.tasks.nodes import NodeClassifier
from regard.tasks.reader import Reader
from regard.tasks.run import Run
from regard.tasks.translate_parallel import ParallelTranslator

BUDGET = 8192  # tokens of a batch
CHUNK = 1024  # texts that are tokenized at a time to check that nothing is lost
WANTED = {
    "text": "texts, not pairs",
    "pairs": "pairs of source and target",
    "matches": "two texts and what is between them",
    "tags": "words and their tags",
}

Row = tuple[str, ...]  # source and target, or a text
Tick = Callable[[int], None]


def evaluate(
    run: Run | Reader | NodeClassifier,
    lines: Iterable[Row],
    metrics: Sequence[str] | None = ("loss", "perplexity"),
    config: DecodeConfig | None = None,
    any_reference: bool = False,
    tick: Tick = lambda done: None,
    tokenize: str | None = None,
    lowercase: bool = False,
    memory: int | None = None,
) -> dict[str, Any]:
    """Return a table that can be written as JSON: scores, signatures of scores, counts, seconds, and notes.

    lines:         pairs of source and target, or texts (each a tuple of one); for a graph, some of its nodes.
    metrics:       None: those of the run, without those that mean nothing on this data; notes say which and why.
    config:        how to decode; None: as the recipe of the run says.
    any_reference: a source on several lines is answered once, and each of its targets counts as right.
    tick:          called with the number of examples done since the last call, first for the loss, then for answers.
    tokenize, lowercase: as in `metrics.measure`.
    memory:        a text is read in segments with a memory of this many previous positions; 0: none; None: as in
                   training, or in windows that overlap by half where the model has no memory.
    """
    if hasattr(run, "evaluate"):  # it has its own evaluation
        return run.evaluate(lines, run.metrics if metrics is None else metrics)
    from_loss = (*LOSS_METRICS, *measures.BITS)
    known = (
        run.metrics
        if isinstance(run, Reader | ParallelTranslator)
        else (*LOSS_METRICS, *measures.TEXT_METRICS)
        if run.pairs
        else from_loss
    )
    names = list(run.metrics if metrics is None else metrics)
    measures.check(names, known)
    rows = list(lines)
    if not rows:
        raise UserError("there is nothing to evaluate: the data has no example")
    kind = getattr(run, "reads", "pairs") if run.pairs else "text"
    if any(len(row) != KINDS[kind] for row in rows):
        raise UserError(f"this model wants {WANTED[kind]}")
    result: dict[str, Any] = {"scores": {}, "signatures": {}, "counts": {"examples": len(rows)}, "seconds": {}}
    documents = getattr(lines, "documents", True)
    result["notes"] = _without_bits(run, rows, documents, names, asked=metrics is not None)
    new = [label for label in _unlearned_labels(run, rows) if label] if isinstance(run, Reader) else []
    if new:
        result["counts"]["not_learned"] = len(new)
        have = "example has a label that was" if len(new) == 1 else "examples have labels that were"
        result["notes"].append(
            f"{len(new):,} {have} not learned, such as {quoted_list(new[:1])}: each of these counts as an error, and "
            "is left out of the loss"
        )
    forced, answered = ([name for name in names if (name in from_loss) == kind] for kind in (True, False))
    if forced:
        begun = time.perf_counter()
        nll, count, left_out = loss(run, rows, tick, memory, documents)
        mean = nll / max(count, 1)
        values = {"loss": mean, "perplexity": math.exp(min(mean, 700))}
        result["counts"] |= {"tokens": count, "left_out": left_out}
        if not run.pairs:  # independent of the tokens, so that tokenizers can be compared
            whole = "".join(text for (text,) in rows)
            sizes = {"characters": len(whole), "bytes": len(whole.encode("utf-8", "replace"))}
            values |= {name: nll / math.log(2) / size for name, size in zip(measures.BITS, sizes.values(), strict=True)}
            result["counts"] |= sizes
        result["scores"] |= {name: values[name] for name in forced}
        result["seconds"]["loss"] = time.perf_counter() - begun
    if answered:
        begun = time.perf_counter()
        sources, references = group_references(rows, any_reference)
        answers = [found[0] for found in run.answers(sources, config, tick=tick)]
        result["seconds"]["answers"] = time.perf_counter() - begun
        scores = measures.measure(answered, [one.text for one in answers], references, tokenize, lowercase)
        result["scores"] |= {score.name: score.value for score in scores}
        result["signatures"] = {score.name: score.signature for score in scores if score.signature}
        result["counts"] |= {"answers": len(answers), "references": sum(map(len, references))}
        result["counts"] |= {"cut": sum(one.cut for one in answers), "not_ended": sum(not one.ended for one in answers)}
        result["config"] = asdict(config or run.config)
    return result


def _without_bits(run: Any, rows: Sequence[Row], documents: bool, names: list[str], asked: bool) -> list[str]:
    """Remove bits per character and per byte from the names if tokenizing loses text, and return a note about it; if
    the user asked for them, refuse."""
    bits = [name for name in names if name in measures.BITS]
    row = _first_lossy(run, rows, documents) if bits else None
    if row is None:
        return []
    text, back = row
    which = " and ".join(bits) if not asked else f"'{bits[0]}'"
    why = f"the tokenizer of this model loses text: {shown(text)} comes back from its tokens as {shown(back)}"
    if asked:
        raise UserError(f"the metric {which} means nothing here, as {why}")
    names[:] = [name for name in names if name not in bits]
    return [f"{which} are left out, as {why}"]


def _unlearned_labels(run: Reader, rows: Sequence[Row]) -> list[str]:
    """Return for each example one of its labels that the run has not learned, or an empty string; refuse if none of all
    labels was learned."""
    labels = [run.labels(row) for row in rows]
    every = {label for some in labels for label in some}
    if not every:
        return []
    names = run.target.label_names()
    if every.isdisjoint(names):
        raise UserError(
            f"none of the labels of this data ({quoted_list(sorted(every)[:3])}) is one of those that were learned "
            f"({quoted_list(names[:3])}): are these the right columns? Say which with --columns"
        )
    new = every.difference(names)
    return [next((label for label in some if label in new), "") for some in labels]


def _first_lossy(run: Run, rows: Sequence[Row], documents: bool) -> tuple[str, str] | None:
    """Return the first text that decoding its tokens does not restore, and the decoded text; None: all are restored. An
    end token after each text counts as its line end."""
    for begin in range(0, len(rows), CHUNK):
        texts = [text for (text,) in rows[begin : begin + CHUNK]]
        for text, ids in zip(texts, run.target.encode(texts), strict=True):
            back = run.target.decode(ids)
            if back != text and not (run.appends_end(documents) and text in (f"{back}\n", f"{back}\r\n")):
                return text, back
    return None


@torch.no_grad()
def loss(
    run: Run | Reader,
    rows: Sequence[Row],
    tick: Tick = lambda done: None,
    memory: int | None = None,
    documents: bool = True,
) -> tuple[float, int, int]:
    """Return the sum of -log p of the targets, their number, and the number of examples that were too long. documents:
    whether the rows are separate texts; see Run.appends_end."""
    objective: Objective = run.objective() if isinstance(run, Reader) else NextToken()
    nll, count, memory_context = 0.0, 0, nullcontext()
    if memory is not None and (memory < 0 or isinstance(run, Reader) or run.pairs):
        raise UserError("memory is a number of positions from 0 on, for a language model that reads a running text")
    if not run.pairs and (memory or (memory is None and _objective_name(run) == "segments")):
        objective, memory_context = Segments(), nullcontext() if memory is None else memory_length(run.model, memory)
        batches, left_out = _windows(run, rows, tick, documents, eval_streams), 0
    else:
        cut = windows if memory == 0 else _overlapping
        batches, left_out = _pairs(run, rows, tick) if run.pairs else (_windows(run, rows, tick, documents, cut), 0)
    with memory_context:
        for batch in batches:
            found = objective(run.model, batch.to(run.device))
            nll, count = nll + float(found.nll), count + found.count
    return nll, count, left_out


def _objective_name(run: Run | Reader) -> str:
    """Return the name of the objective of the training."""
    return run.model.recipe.get("objective", {}).get("part", "next_token")  # type: ignore[union-attr]


def _with_learned_labels(run: Reader, rows: Sequence[Row]) -> list[Row]:
    """Return the examples with at least one learned label, or all where answers are not labels."""
    if not any(run.labels(row) for row in rows):
        return list(rows)
    known = set(run.target.label_names())
    return [row for row in rows if not known.isdisjoint(run.labels(row))]


class InMemoryDataset:
    """A dataset in memory."""

    def __init__(self, rows: list[tuple[np.ndarray, ...]]):
        self.rows = rows
        self.lengths = np.array([[len(side) for side in row] for row in rows])

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        return self.rows[index]


def _pairs(run: Run | Reader, rows: Sequence[Row], tick: Tick) -> tuple[Iterator[Batch], int]:
    if isinstance(run, Reader):
        rows = _with_learned_labels(run, rows)
        coded, limits = run.encode_examples(rows), (run.limit, None, None)
    else:
        sources, targets = zip(*rows, strict=True)
        ends = [[*ids, run.target.end] for ids in run.target.encode(targets)]
        coded = [
            tuple(map(np.array, pair))
            for pair in zip(run.source.encode_with_special_tokens(sources), ends, strict=True)
        ]
        limits = (run.model.source_limit, run.model.limit)
    kept = [row for row in coded if all(len(p) <= (n or math.inf) for p, n in zip(row, limits, strict=False))]
    if not kept:
        raise UserError(f"none of the {len(rows)} examples is short enough for the positions of this model")
    if isinstance(run, Reader):
        batches: Batches = run.batches(InMemoryDataset(kept), BUDGET)
    else:
        batches = BucketedBatches(InMemoryDataset(kept), BUDGET, 0, run.target.start, run.target.pad, shuffle=False)
    return _with_progress(first_epoch(batches), tick), len(rows) - len(kept)


def _with_progress(batches: Iterator[Batch], tick: Tick) -> Iterator[Batch]:
    for batch in batches:
        yield batch
        tick(len(batch.tokens))


def _overlapping(text: np.ndarray, before: int, context: int, rows: int, pad: int) -> Iterator[Batch]:
    """Yield windows that overlap by half, so that no target has little context."""
    return windows(text, before, context, rows, pad, context // 2)


def _windows(run: Run, rows: Sequence[Row], tick: Tick, documents: bool, cut: Callable) -> Iterator[Batch]:
    """Yield batches of one long text, in windows of the context length of the training."""
    mark = [run.target.end] if run.appends_end(documents) else []
    coded = run.target.encode([text for (text,) in rows])
    text = np.fromiter(chain.from_iterable([*ids, *mark] for ids in coded), np.int64)
    if not len(text):
        raise UserError("there is nothing to evaluate: the text has no token")
    context = Settings.read(run.model.recipe.get("train", {})).context_length  # type: ignore[union-attr]
    context = min(context, run.model.limit or context)
    yield from cut(text, run.token_before_text, context, max(BUDGET // context, 1), run.target.pad)
    tick(len(rows))
