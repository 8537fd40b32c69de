"""Export decoders that write all tokens at once as two ONNX graphs.

    encoder.onnx   input_ids, attention_mask  ->  what the decoder reads of the source, and `lengths` (batch,): the most
                   probable number of positions of each row's canvas
    decoder.onnx   input_ids (a canvas; -1: no token), canvas_mask, encoder_attention_mask, what the encoder returned
                   ->  logits (batch, canvas, vocab), and what the search of some heads needs:
                   dag    links (batch, canvas, canvas), log-probabilities
                   crf    candidates (batch, canvas, k), tokens, and transitions (batch, canvas - 1, k, k), scores

One pass with argmax is the strategy `parallel`; the other strategies are a few lines around the same graph.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.core import BLANK, Context, Model, UserError
from regard.core.context import Memory
from regard.core.mixer import map_tensors
from regard.decode.canvas import best_canvases
from regard.ops import crf
from regard.schema import name_of
from regard.tasks.run import Run

from .onnx_decoders import dynamic_axes, flatten
from .onnx_graph import Tensors, compare, export_graph, padded_mask, run_graph, sizes

SEARCHED = {"crf": ["candidates", "transitions"], "dag": ["links"]}  # head -> outputs of the decoder beside logits


def check_writes_once(model: Model) -> None:
    """Refuse a decoder whose answer is not a canvas of a given length that one graph fills."""
    if name_of(model.head) == "edits":
        raise UserError(
            "a decoder that edits is not exported: it deletes, inserts and fills in by turns, with a head for each, "
            "and the length of its canvas changes in between"
        )


class ParallelEncoder(nn.Module):
    """Returns the tensors that the decoder reads of a source, and the most probable length of each row's canvas."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> list[Tensor]:
        memory = self.model.encode(input_ids, attention_mask != 0)
        return [*flatten(_needed(self.model, memory)), best_canvases(self.model, memory, 1).lengths[:, 0]]


class ParallelDecoder(nn.Module):
    """Returns the logits of a canvas, and what a search over it needs. Where canvas_mask is 0, nothing is on it."""

    def __init__(self, model: Model, memory: Memory):
        super().__init__()
        self.model, self.template = model, _needed(model, memory)

    def forward(
        self, input_ids: Tensor, canvas_mask: Tensor, encoder_attention_mask: Tensor, encoded: list[Tensor]
    ) -> list[Tensor]:
        model, head, left = self.model, self.model.head, iter(encoded)
        memory = map_tensors(self.template, lambda _: next(left))._replace(valid=encoder_attention_mask != 0)
        valid = canvas_mask != 0
        context = Context.begin(*input_ids.shape, input_ids.device, valid=valid, memory=memory)
        x = model.hidden(torch.where(valid, input_ids, BLANK), context)
        logits = head(x, context)
        if name_of(head) == "dag":
            return [logits, head.links(x, context)]  # type: ignore[operator]
        if name_of(head) == "crf":
            tokens = crf.candidates(logits, head.candidates)  # type: ignore[arg-type]
            return [logits, tokens, head.transitions(x, tokens)]  # type: ignore[operator]
        return [logits]


def write_parallel(run: Run, folder: Path) -> dict[str, Any]:
    """Write both graphs, compare them with the model, and return sessions of them by name."""
    model = run.model
    tokens, mask = model.source_embed.random_input(2, 5), padded_mask(2, 5)  # type: ignore[union-attr]
    memory = model.encode(tokens, mask != 0)
    names = _names(_needed(model, memory))
    encoder = export_graph(
        ParallelEncoder(model), (tokens, mask),
        Tensors(["input_ids", "attention_mask"], [{0: "batch", 1: "source"}] * 2),
        [*names, "lengths"], folder / "encoder.onnx",
    )  # fmt: skip
    longer = model.encode(model.source_embed.random_input(2, 7), padded_mask(2, 7) != 0)  # type: ignore[union-attr]
    encoded, others = flatten(_needed(model, memory)), flatten(_needed(model, longer))
    inputs = Tensors(["input_ids", "canvas_mask", "encoder_attention_mask", *names], [{0: "batch", 1: "canvas"}] * 2)
    inputs.axes.append({0: "batch", 1: "source"})
    inputs.axes.extend(dynamic_axes(one, other) for one, other in zip(encoded, others, strict=True))
    decoder_module = ParallelDecoder(model, memory)
    outputs = ["logits", *SEARCHED.get(name_of(model.head), [])]
    given = (_canvas(model, 2, 8), padded_mask(2, 8), mask, encoded)
    decoder = export_graph(decoder_module, given, inputs, outputs, folder / "decoder.onnx")
    for batch, length in sizes(model.limit):
        _compare(model, encoder, decoder, batch, length)
    return {"encoder": encoder, "decoder": decoder}


def _compare(model: Model, encoder: Any, decoder: Any, batch: int, length: int) -> None:
    """Compare both graphs with the model, on canvases of this size and sources that are a little longer; the row with
    the longest canvas has the shortest source."""
    size = min(length + 2, model.source_limit or length + 2)
    source, mask = model.source_embed.random_input(batch, size), padded_mask(batch, size).flip(0)  # type: ignore[union-attr]
    memory = model.encode(source, mask != 0)
    template, found = _needed(model, memory), run_graph(encoder, {"input_ids": source, "attention_mask": mask})
    theirs = iter([torch.from_numpy(found[name]) for name in _names(template)])
    read = map_tensors(template, lambda _: next(theirs))._replace(valid=mask != 0)
    # what comes from the graph's own states, so that a tie in a classifier of lengths is the same tie
    expected = best_canvases(model, read, 1)
    if not torch.equal(torch.from_numpy(found["lengths"]), expected.lengths[:, 0]):
        raise ValueError("the graph and the model differ in the lengths of canvases")
    if expected.copies is not None and not torch.equal(read.copies, expected.copies[:, 0]):
        raise ValueError("the graph and the model differ in the copies of source tokens")
    canvas, canvas_mask = _canvas(model, batch, length), padded_mask(batch, length)
    given = found | {"input_ids": canvas, "canvas_mask": canvas_mask, "encoder_attention_mask": mask}
    told, real = {name: torch.from_numpy(one) for name, one in run_graph(decoder, given).items()}, canvas_mask != 0
    context = Context.begin(batch, length, valid=real, memory=memory._replace(copies=read.copies))
    x = model.hidden(torch.where(real, canvas, BLANK), context)
    logits = model.head(x, context)
    compare(told["logits"][real], logits[real], model)
    if "links" in told:
        links = model.head.links(x, context)[real]  # type: ignore[operator]
        possible = links.isfinite()
        if not torch.equal(possible, told["links"][real].isfinite()):
            raise ValueError("the graph and the model differ in which links are possible")
        compare(*(one.where(possible, 0.0) for one in (told["links"][real], links)), model)
    if "candidates" in told:  # whose order is another where two logits are equal but for rounding
        tokens = told["candidates"]
        best = logits.gather(2, crf.candidates(logits, model.head.candidates))  # type: ignore[arg-type]
        compare(logits.gather(2, tokens)[real], best[real], model)
        pairs = real[:, 1:]
        if bool(pairs.any()):
            compare(told["transitions"][pairs], model.head.transitions(x, tokens)[pairs], model)  # type: ignore[operator]


def _needed(model: Model, memory: Memory) -> Memory:
    """Return what the decoder reads of a memory besides its mask, since a graph has no inputs that nothing reads."""
    places = 2 if getattr(model.embed, "ask", None) is not None else 1  # copies by attention alone look at positions
    return memory._replace(valid=None, embedded=memory.embedded[:places])


def _names(memory: Memory) -> list[str]:
    count = len(flatten((memory.final_states, memory.layer_outputs)))
    return [
        "encoder_hidden_states",
        *(f"encoder_states.{i}" for i in range(1, count + 1)),
        *("source_vectors", "source_vectors_at_positions")[: len(memory.embedded)],
        *(["copies"] if memory.copies is not None else []),
    ]


def _canvas(model: Model, batch: int, length: int) -> Tensor:
    """Return canvases on which every other position, or so, is blank."""
    tokens = model.embed.random_input(batch, length)
    return torch.where(torch.rand(batch, length) < 0.5, BLANK, tokens)
