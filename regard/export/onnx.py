"""A model as ONNX graphs: for an encoder-decoder `encoder.onnx` and `decoder.onnx`, else `decoder.onnx` alone.

    encoder   tokens (batch, source), valid (batch, source)  ->  cross.0.keys, cross.0.values, ...
    decoder   tokens (batch, n), positions (batch, n), at (batch, past), past.0.keys, past.0.values, ...
              and of an encoder-decoder source_valid, cross.0.keys, ...
              ->  scores (batch, n, vocab), now_at (batch, past + n), now.0.keys, ...

What is `now` after one step is `past` in the next; at first, past is 0 long. `at` says which position stands where, -1
for padding. Keys and values are (batch, past, heads, dim). A text beside the graphs, model.json, names the special
tokens. Layers are made of attention, over themselves or the source, and of what treats every position alone.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from regard.core import Context, Mixer, Model, Pointwise, UserError
from regard.core.parts import name_of
from regard.kernels.multihead import MultiHead
from regard.kernels.see import See
from regard.run import Run


def write(run: Run, folder: Path, numbers: str | None) -> None:
    if numbers is not None:
        raise UserError("ONNX graphs are written in float32: make them smaller with the tools of onnxruntime")
    model = run.model
    model.eval()
    _check(model)
    with _plain(model), torch.no_grad():
        if model.encoder is not None:
            _write_encoder(model, folder / "encoder.onnx")
        _write_decoder(model, folder / "decoder.onnx")
    marks = {"start": run.target.start, "end": run.target.end, "pad": run.target.pad, "opening": run.opening}
    told = {"kind": model.kind, "vocab": model.vocab, "layers": len(model.stack.layers), **marks}
    (folder / "model.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
    for name in ("tokenizer.json", "source.tokenizer.json", "target.tokenizer.json"):
        if run.folder is not None and (run.folder / name).is_file():
            (folder / name).write_bytes((run.folder / name).read_bytes())


class Encoder(nn.Module):
    """The source once, as keys and values for every layer of the decoder."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, valid: Tensor) -> list[Tensor]:
        model, at = self.model, torch.arange(tokens.shape[1], device=tokens.device)[None]
        context = Context(at.expand_as(tokens), valid, fresh=True)
        assert model.encoder is not None
        assert model.source_embed is not None
        x = model.encoder(model.source_embed(tokens, context), context)
        return [tensor for mixer in _crossing(model) for tensor in mixer.keys(x, at)]


class Decoder(nn.Module):
    """The next positions, after what is past."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        at: Tensor,
        past: list[Tensor],
        source_valid: Tensor | None = None,
        cross: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        model, context = self.model, Context(positions)
        now_at = torch.cat((at, positions), 1)
        before, source = iter(past), iter(cross or ())
        if source_valid is not None:
            marked = torch.where(source_valid, torch.arange(source_valid.shape[1], device=tokens.device)[None], -1)
        now: list[Tensor] = []

        def branch(mixer: Mixer, x: Tensor) -> Tensor:
            if isinstance(mixer, Pointwise):
                return mixer(x, context)
            assert isinstance(mixer, MultiHead)
            if mixer.over == "memory":
                see = See(mixer.pattern, positions, marked, holes=True)
                return mixer.look(x, next(source), next(source), see, None)
            new = mixer.keys(x, positions)
            keys, values = (torch.cat((next(before), tensor), 1) for tensor in new)
            now.extend((keys, values))
            return mixer.look(x, keys, values, See(mixer.pattern, positions, now_at, holes=True), None)

        stream = model.embed(tokens, context)
        for layer in model.stack._layers:
            calls = [lambda x, mixer=mixer: branch(mixer, x) for mixer in layer.mixers]
            stream = layer.wiring(stream, calls, context)
        return model.head(model.stack.norm(stream), context), now_at, now


def _write_encoder(model: Model, path: Path) -> None:
    assert model.source_embed is not None
    tokens = model.source_embed.draw(2, 5)
    valid = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    rows, time = torch.export.Dim("batch"), torch.export.Dim("source")
    names = [f"cross.{i}.{what}" for i in range(len(_crossing(model))) for what in ("keys", "values")]
    shapes = {"tokens": {0: rows, 1: time}, "valid": {0: rows, 1: time}}
    _export(Encoder(model), (tokens, valid), path, ["tokens", "valid"], names, shapes)


def _write_decoder(model: Model, path: Path) -> None:
    batch, past, new, source = 2, 3, 4, 5
    tokens, positions = model.embed.draw(batch, new), torch.arange(past, past + new).expand(batch, new).contiguous()
    at = torch.arange(past).expand(batch, past).contiguous()
    own, across = _own(model), _crossing(model)
    held = [torch.randn(batch, past, m.kv_heads, d) for m in own for d in (m.key_dim, m.dim)]
    cross = [torch.randn(batch, source, m.kv_heads, d) for m in across for d in (m.key_dim, m.dim)]
    rows, before, step, far = (torch.export.Dim(name) for name in ("batch", "past", "n", "source"))
    valid = torch.ones(batch, source, dtype=torch.bool)
    pairs = ("keys", "values")
    inputs = ["tokens", "positions", "at", *(f"past.{i}.{what}" for i in range(len(own)) for what in pairs)]
    outputs = ["scores", "now_at", *(f"now.{i}.{what}" for i in range(len(own)) for what in pairs)]
    shapes: dict[str, Any] = {"tokens": {0: rows, 1: step}, "positions": {0: rows, 1: step}, "at": {0: rows, 1: before}}
    shapes["past"] = [{0: rows, 1: before} for _ in held]
    given: tuple = (tokens, positions, at, held)
    if across:
        inputs += ["source_valid", *(f"cross.{i}.{what}" for i in range(len(across)) for what in pairs)]
        shapes |= {"source_valid": {0: rows, 1: far}, "cross": [{0: rows, 1: far} for _ in cross]}
        given = (*given, valid, cross)
    _export(Decoder(model), given, path, inputs, outputs, shapes)


def _export(
    module: nn.Module, given: tuple, path: Path, inputs: list[str], outputs: list[str], shapes: dict[str, Any]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, given, str(path), input_names=inputs, output_names=outputs, dynamic_shapes=shapes, dynamo=True,
            external_data=False, verbose=False,
        )  # fmt: skip


@contextmanager
def _plain(model: Model) -> Iterator[None]:
    """Inside, attention is computed one product after the other, with no choice that depends on the numbers."""
    attends = [module.attend for module in model.modules() if isinstance(module, MultiHead)]
    before = [attend.kernel for attend in attends]
    for attend in attends:
        attend.kernel = "reference"
    try:
        yield
    finally:
        for attend, kernel in zip(attends, before, strict=True):
            attend.kernel = kernel


def _own(model: Model) -> list[MultiHead]:
    return [m for layer in model.stack._layers for m in layer.mixers if isinstance(m, MultiHead) and m.over == "self"]


def _crossing(model: Model) -> list[MultiHead]:
    return [m for layer in model.stack._layers for m in layer.mixers if isinstance(m, MultiHead) and m.over == "memory"]


def _check(model: Model) -> None:
    stacks = [model.stack] if model.encoder is None else [model.encoder, model.stack]
    for stack in stacks:
        for layer in stack._layers:
            if layer.wiring.lanes > 1:
                _refuse(f"the wiring '{name_of(layer.wiring)}'")
            for mixer in layer.mixers:
                if not isinstance(mixer, Pointwise) and name_of(mixer) != "attention":
                    _refuse(f"the mixer '{name_of(mixer)}'")


def _refuse(what: str) -> NoReturn:
    raise UserError(f"the ONNX graphs have keys and values as their cache, and {what} keeps something else")
