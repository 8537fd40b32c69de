"""Export a model as ONNX graphs. Each graph is run in onnxruntime and compared with the model before it is kept.

    model.onnx     of a model that reads whole texts (it classifies, tags, compares, embeds or fills in):
                   input_ids, attention_mask [, token_type_ids]  ->  logits or embeddings
    encoder.onnx   of an encoder-decoder:  input_ids, attention_mask  ->  the source's keys, values and states
    decoder.onnx   of an encoder-decoder or a language model, in one of two forms:
                   with a cache:     input_ids, position_ids, past.*  ->  logits, present.*     (the next tokens alone)
                   without a cache:  input_ids                        ->  logits                (the whole prefix)

What is `present.*` after one step is `past.*` in the next; `start.npz` holds the first `past.*` of one row. Attention
keeps its keys and values there, (batch, past, heads, dim), and a mixer with a state of fixed size keeps that state, in
which case a step takes one token. A decoder whose state is neither is written without a cache. Decoders that write all
tokens at once are in `onnx_parallel.py`.

Batch and length are dynamic. `model.json` lists inputs, outputs and special tokens; `README.md` shows how to run it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Embed, Head, Length, Mixer, Model, Norm, Pointwise, Position, Score, UserError, Wiring
from regard.data.matched import num_segment_types
from regard.schema import name_of
from regard.tasks.embed import Embedder
from regard.tasks.match import Matcher
from regard.tasks.reader import Reader
from regard.tasks.run import Run

from .onnx_decoders import write_cached, write_uncached
from .onnx_graph import Tensors, compare, export_graph, padded_mask, plain_attention, run_graph, sizes
from .onnx_parallel import check_writes_once, write_parallel
from .onnx_usage import describe

PARTS = {
    Mixer: "mixer", Position: "position", Score: "score", Norm: "norm", Wiring: "wiring", Embed: "embed", Head: "head",
    Length: "length",
}  # fmt: skip


def write(run: Any, folder: Path, numbers: str | None) -> None:
    """Write the graphs of a run and what is needed to use them."""
    if numbers is not None:
        raise UserError("ONNX graphs are written in float32: make them smaller with the tools of onnxruntime")
    model = run.model
    if not isinstance(model, Model) or run.takes != "texts" or not isinstance(run, Run | Reader):
        known = "classifiers, taggers, matchers, sentence vectors, masked models, encoder-decoders and language models"
        raise UserError(f"ONNX graphs are written of {known} on texts, and not of the {type(run).__name__} of this run")
    model.float().eval()
    if model.length is not None:
        check_writes_once(model)
        forms: list[Any] = [write_parallel]
    else:
        forms = [write_cached, write_uncached] if isinstance(run, Run) else [_write_reader]
    failures: list[Exception] = []
    with plain_attention(model), torch.no_grad():
        for form in forms:
            try:
                graphs = form(run, folder)
                break
            except (MemoryError, OSError):
                raise
            except Exception as error:  # torch, onnxscript and onnxruntime have many
                failures.append(error)
                for path in folder.iterdir():
                    path.unlink()
        else:
            raise UserError(_refusal(model, failures)) from failures[-1]
    describe(run, folder, graphs)


class ReaderModule(nn.Module):
    """Returns the logits of a text, once or at every token, or its vector."""

    def __init__(self, run: Reader):
        super().__init__()
        self.model, self.embedder = run.model, run if isinstance(run, Embedder) else None

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        valid = attention_mask != 0
        if self.embedder is None:
            return self.model(input_ids, valid, segments=token_type_ids)
        how, unit = self.embedder._how(None, None)
        pooled = self.embedder._pooled(input_ids, valid, how)
        return F.normalize(pooled, dim=-1) if unit else pooled


def _write_reader(run: Reader, folder: Path) -> dict[str, Any]:
    module, model = ReaderModule(run), run.model
    segmented = isinstance(run, Matcher) and num_segment_types(model) is not None

    def draw(batch: int, length: int) -> tuple[Tensor, ...]:
        tokens, mask = torch.randint(model.vocab, (batch, length)), padded_mask(batch, length)
        types = (torch.arange(length) >= length // 2).long().expand(batch, length).contiguous()
        return (tokens, mask, types) if segmented else (tokens, mask)

    names = ["input_ids", "attention_mask", *(["token_type_ids"] if segmented else [])]
    inputs = Tensors(names, [{0: "batch", 1: "length"}] * len(names))
    outputs = ["embeddings" if isinstance(run, Embedder) else "logits"]
    session = export_graph(module, draw(2, 5), inputs, outputs, folder / "model.onnx")
    for batch, length in sizes(model.limit):
        given = draw(batch, length)
        expected = module(*given)
        found = torch.from_numpy(run_graph(session, dict(zip(names, given, strict=True)))[outputs[0]])
        if expected.dim() == 3:  # compare real tokens only, not padding
            expected, found = expected[given[1] != 0], found[given[1] != 0]
        compare(found, expected, model)
    return {"model": session}


def _refusal(model: Model, failures: list[Exception]) -> str:
    """Return a sentence that names the part on which the export failed."""
    where: Any = None
    cause: BaseException | None = failures[-1]
    while cause is not None:
        trace = cause.__traceback__
        while trace is not None:
            one = trace.tb_frame.f_locals.get("self")
            if isinstance(one, tuple(PARTS)) and name_of(one) != "attention":
                where = one
            trace = trace.tb_next
        cause = cause.__cause__ or cause.__context__
    if where is None or isinstance(where, Wiring):
        stacks = [stack for stack in (model.encoder, model.stack) if stack is not None]
        mixers = [mixer for stack in stacks for layer in stack._layers for mixer in layer.mixers]
        unusual = [m for m in mixers if not isinstance(m, Pointwise) and name_of(m) != "attention"]
        where = unusual[0] if unusual else where
    kind = next((word for part, word in PARTS.items() if isinstance(where, part)), None)
    what = "this model" if kind is None else f"the {kind} '{name_of(where)}' of this model"
    missing = re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)'", " ".join(map(str, failures)))
    why = "its control flow depends on values or lengths" if missing is None else f"ONNX lacks {missing[1]}"
    return f"{what} cannot be written as an ONNX graph, since {why}"
