"""Export generative models as ONNX graphs: a decoder, and an encoder where there is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from regard.bases.attention_mask import AttentionMask
from regard.bases.multihead import MultiHead
from regard.core import Context, Mixer, Model, Pointwise, UserError
from regard.core.context import Memory
from regard.core.mixer import map_tensors
from regard.schema import name_of
from regard.tasks.run import Run

from .onnx_graph import Tensors, compare, export_graph, padded_mask, run_graph, sizes

STEPS = (4, 1, 3, 90)  # lengths of the steps in which a decoder with a cache is compared with the model


class Encoder(nn.Module):
    """Returns the keys and values of the source for every cross-attention, and the initial states of other mixers."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> list[Tensor]:
        memory = self.model.encode(input_ids, attention_mask != 0)
        return [*_cross_keys_values(self.model, memory), *_initial_states(self.model, memory, input_ids.shape[0])]


class Decoder(nn.Module):
    """Returns the logits of the next tokens and the updated cache. position_ids are -1 for padding, which leaves the
    state of its row unchanged."""

    def __init__(self, model: Model, memory: Memory | None):
        super().__init__()
        self.model = model
        self.templates = [mixer.start(_empty_context(2, memory), 1) for _, _, mixer in _stateful(model)]

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_positions: Tensor,
        past: list[Tensor],
        states: list[Tensor],
        encoder_attention_mask: Tensor | None = None,
        cross: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        model, context = self.model, Context(position_ids.clamp(min=0), position_ids >= 0)
        positions = torch.cat((past_positions, position_ids), 1)
        before, past_states, source, templates = iter(past), iter(states), iter(cross or ()), iter(self.templates)
        source_at = None
        if encoder_attention_mask is not None:
            columns = torch.arange(encoder_attention_mask.shape[1], device=input_ids.device)[None]
            source_at = torch.where(encoder_attention_mask != 0, columns, -1)
        present: list[Tensor] = []
        after: list[Tensor] = []

        def branch(mixer: Mixer, x: Tensor) -> Tensor:
            if isinstance(mixer, Pointwise):
                return mixer(x, context)
            if not _is_attention(mixer):
                y, state = mixer.step(x, map_tensors(next(templates), lambda _: next(past_states)), context)
                after.extend(flatten(state))
                return y
            if mixer.over == "memory":
                assert source_at is not None
                mask = AttentionMask(mixer.pattern, position_ids, source_at, holes=True)
                return mixer.look(x, next(source), next(source), mask, None)
            keys, values = (torch.cat((next(before), new), 1) for new in mixer.keys(x, position_ids))
            present.extend((keys, values))
            return mixer.look(x, keys, values, AttentionMask(mixer.pattern, position_ids, positions, holes=True), None)

        first = model.stack._layers[0].wiring
        stream = first.enter(model.embed(input_ids, context))
        for layer in model.stack._layers:
            calls = [lambda x, mixer=mixer: branch(mixer, x) for mixer in layer.mixers]
            stream = layer.wiring(stream, calls, context)
        hidden = first.leave(stream, model.stack.norm, context)
        return model.head(hidden, context), positions, present, after


def write_cached(run: Run, folder: Path) -> dict[str, Any]:
    model = run.model
    batch, past, source = 2, 3, 5
    memory = _example_memory(model, batch, source)
    own, across, others = _self_attentions(model), _cross_attentions(model), _stateful(model)
    new = 1 if others else 4
    states, longer = (
        _initial_states(model, made, batch) for made in (memory, _example_memory(model, batch, source + 2))
    )
    past_values = [torch.randn(batch, past, m.kv_heads, dim) for _, _, m in own for dim in (m.key_dim, m.dim)]
    cross = [] if memory is None else _cross_keys_values(model, memory)
    position_ids = torch.arange(past, past + new).expand(batch, new).contiguous()
    past_positions = torch.arange(past).expand(batch, past).contiguous()
    tokens = model.embed.random_input(batch, new)

    inputs = Tensors(
        ["input_ids", "position_ids", "past.positions", *_names("past", own), *_state_names("past", others, memory)],
        [*[{0: "batch", **({} if others else {1: "new"})}] * 2, *[{0: "batch", 1: "past"}] * (1 + len(past_values))],
    )
    state_axes = [dynamic_axes(one, other) for one, other in zip(states, longer, strict=True)]
    inputs.axes.extend(state_axes)
    outputs = ["logits", "present.positions", *_names("present", own), *_state_names("present", others, memory)]
    given: tuple = (tokens, position_ids, past_positions, past_values, states)
    if memory is not None:
        source_names = _names("cross", across)
        mask = padded_mask(batch, source)
        encoder = export_graph(
            Encoder(model),
            (model.source_embed.random_input(batch, source), mask),  # type: ignore[union-attr]
            Tensors(["input_ids", "attention_mask"], [{0: "batch", 1: "source"}] * 2),
            [*source_names, *_state_names("past", others, memory)],
            folder / "encoder.onnx",
        )
        inputs.names.extend(["encoder_attention_mask", *source_names])
        inputs.axes.extend([{0: "batch", 1: "source"}] * (1 + len(cross)))
        given = (*given, mask, cross)
    else:
        encoder = None
    decoder = export_graph(Decoder(model, memory), given, inputs, outputs, folder / "decoder.onnx")
    start = {"past.positions": np.zeros((1, 0), np.int64)}
    for name, tensor in zip(_names("past", own), past_values, strict=True):
        start[name] = np.zeros((1, 0, *tensor.shape[2:]), np.float32)
    if memory is None:
        first = _initial_states(model, None, 1)
        start |= dict(zip(_state_names("past", others, None), (one.numpy() for one in first), strict=True))
    np.savez(folder / "start.npz", **start)  # type: ignore[arg-type]
    _compare_steps(model, encoder, decoder, start, bool(others))
    return {"decoder": decoder} if encoder is None else {"encoder": encoder, "decoder": decoder}


def _compare_steps(model: Model, encoder: Any, decoder: Any, start: dict[str, np.ndarray], one_by_one: bool) -> None:
    """Compare the logits of a decoder with a cache with those of the model for the whole sequence. The first step is
    padded to the longest row, and each row goes on from its own position."""
    batch = 3
    length = min(sum(STEPS), model.limit or sum(STEPS))
    tokens = model.embed.random_input(batch, length)
    past_values: dict[str, Any] = {name: np.repeat(value, batch, 0) for name, value in start.items()}
    memory = None
    if encoder is not None:
        source = model.source_embed.random_input(batch, min(11, model.source_limit or 11))  # type: ignore[union-attr]
        mask = padded_mask(*source.shape)
        memory = model.encode(source, mask != 0)
        past_values |= run_graph(encoder, {"input_ids": source, "attention_mask": mask}) | {
            "encoder_attention_mask": mask
        }
    expected = model(tokens, memory=memory)
    for position_ids in _ragged_steps(length, one_by_one):
        rows, at = torch.arange(batch)[:, None], position_ids.clamp(min=0)
        found = run_graph(decoder, past_values | {"input_ids": tokens[rows, at], "position_ids": position_ids})
        past_values |= {name.replace("present.", "past."): value for name, value in found.items()}
        real = position_ids >= 0
        compare(torch.from_numpy(found["logits"])[real], expected[rows, at][real], model)


def _ragged_steps(length: int, one_by_one: bool) -> Iterator[Tensor]:
    """Yield the position_ids (3, new) of steps until the first of three rows has reached this length; -1: padding."""
    first, columns = padded_mask(3, min(STEPS[0], length)), torch.arange(length)
    lengths = first.sum(1, keepdim=True)
    prompt = torch.where(first != 0, columns[: first.shape[1]], -1)
    yield from prompt.split(1, 1) if one_by_one else [prompt]
    left = length - first.shape[1]
    sizes = [1] * left if one_by_one else [min(size, left - sum(STEPS[1:i])) for i, size in enumerate(STEPS[1:], 1)]
    for size in sizes:
        if size > 0:
            yield lengths + columns[:size]
            lengths = lengths + size


def _self_attentions(model: Model) -> list[tuple[int, str, Any]]:
    return [found for found in _branches(model) if _is_attention(found[2]) and found[2].over == "self"]


def _cross_attentions(model: Model) -> list[tuple[int, str, Any]]:
    return [found for found in _branches(model) if _is_attention(found[2]) and found[2].over == "memory"]


def _stateful(model: Model) -> list[tuple[int, str, Any]]:
    """Return the decoder's branches that are neither attention nor position-wise."""
    return [found for found in _branches(model) if not isinstance(found[2], Pointwise) and not _is_attention(found[2])]


def _is_attention(mixer: Mixer) -> TypeGuard[MultiHead]:
    return isinstance(mixer, MultiHead) and name_of(mixer) == "attention"


def _branches(model: Model) -> list[tuple[int, str, Any]]:
    return [(i, name, mixer) for i, layer in enumerate(model.stack._layers) for name, mixer in layer.branches.items()]


def _names(prefix: str, branches: Sequence[tuple[int, str, Any]]) -> list[str]:
    return [f"{prefix}.{i}.{name}.{what}" for i, name, _ in branches for what in ("keys", "values")]


def _state_names(prefix: str, branches: Sequence[tuple[int, str, Any]], memory: Memory | None) -> list[str]:
    counts = [(i, name, len(flatten(mixer.start(_empty_context(2, memory), 1)))) for i, name, mixer in branches]
    return [f"{prefix}.{i}.{name}.{k}" for i, name, count in counts for k in range(count)]


def _initial_states(model: Model, memory: Memory | None, batch: int) -> list[Tensor]:
    """Return the initial states of mixers that are not attention. Refuse a state that grows with the sequence."""
    found: list[Tensor] = []
    for _, _, mixer in _stateful(model):
        state, longer = (flatten(mixer.start(_empty_context(batch, memory), capacity)) for capacity in (1, 9))
        if [one.shape for one in state] != [one.shape for one in longer]:
            raise UserError(f"the state of the mixer '{name_of(mixer)}' grows")
        found += state
    return found


def dynamic_axes(one: Tensor, other: Tensor) -> dict[int, str]:
    """Return the dynamic axes of a state, given two examples made from sources of different lengths."""
    sizes = enumerate(zip(one.shape[1:], other.shape[1:], strict=True), 1)
    return {0: "batch", **{axis: "source" for axis, (a, b) in sizes if a != b}}


def _cross_keys_values(model: Model, memory: Memory) -> list[Tensor]:
    at = torch.arange(memory.x.shape[1], device=memory.x.device)[None]
    return [tensor for _, _, mixer in _cross_attentions(model) for tensor in mixer.keys(memory.x, at)]


def _empty_context(batch: int, memory: Memory | None) -> Context:
    return Context.begin(batch, 0, memory=memory)


def _example_memory(model: Model, batch: int, source: int) -> Memory | None:
    return None if model.source_embed is None else model.encode(model.source_embed.random_input(batch, source))


def flatten(state: Any) -> list[Tensor]:
    """Return all tensors of nested tuples, in order."""
    found: list[Tensor] = []

    def add(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(state, add)
    return found


class UncachedEncoder(nn.Module):
    """Returns the encoded source."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> list[Tensor]:
        memory = self.model.encode(input_ids, attention_mask != 0)
        return flatten((memory.x, memory.final_states, memory.layer_outputs))


class UncachedDecoder(nn.Module):
    """Returns the logits at every token of the whole prefix."""

    def __init__(self, model: Model, memory: Memory | None):
        super().__init__()
        self.model = model
        self.template = None if memory is None else (memory.x, memory.final_states, memory.layer_outputs)

    def forward(
        self, input_ids: Tensor, encoder_attention_mask: Tensor | None = None, encoded: list[Tensor] | None = None
    ) -> Tensor:
        if encoded is None or encoder_attention_mask is None:
            return self.model(input_ids)
        tensors = iter(encoded)
        x, finals, views = map_tensors(self.template, lambda _: next(tensors))
        return self.model(input_ids, memory=Memory(x, encoder_attention_mask != 0, finals, views))


def write_uncached(run: Run, folder: Path) -> dict[str, Any]:
    model = run.model
    batch, source, length = 2, 5, 7
    memory = _example_memory(model, batch, source)
    inputs, encoder = Tensors(["input_ids"], [{0: "batch", 1: "length"}]), None
    given: tuple = (model.embed.random_input(batch, length),)
    if memory is not None:
        encoded, longer = (
            UncachedEncoder(model)(model.source_embed.random_input(batch, size), padded_mask(batch, size))  # type: ignore[union-attr]
            for size in (source, source + 2)
        )
        names = ["encoder_hidden_states", *(f"encoder_states.{i}" for i in range(1, len(encoded)))]
        encoder = export_graph(
            UncachedEncoder(model),
            (model.source_embed.random_input(batch, source), padded_mask(batch, source)),  # type: ignore[union-attr]
            Tensors(["input_ids", "attention_mask"], [{0: "batch", 1: "source"}] * 2),
            names,
            folder / "encoder.onnx",
        )
        inputs.names.extend(["encoder_attention_mask", *names])
        inputs.axes.append({0: "batch", 1: "source"})
        inputs.axes.extend(dynamic_axes(one, other) for one, other in zip(encoded, longer, strict=True))
        given = (*given, padded_mask(batch, source), encoded)
    decoder = export_graph(UncachedDecoder(model, memory), given, inputs, ["logits"], folder / "decoder.onnx")
    for rows, length in sizes(model.limit):
        tokens, known, memory = model.embed.random_input(rows, length), {}, None
        if encoder is not None:
            size = min(length + 2, model.source_limit or length + 2)
            mask, texts = padded_mask(rows, size), model.source_embed.random_input(rows, size)  # type: ignore[union-attr]
            known = run_graph(encoder, {"input_ids": texts, "attention_mask": mask}) | {"encoder_attention_mask": mask}
            memory = model.encode(texts, mask != 0)
        found = run_graph(decoder, known | {"input_ids": tokens})["logits"]
        compare(torch.from_numpy(found), model(tokens, memory=memory), model)
    return {"decoder": decoder} if encoder is None else {"encoder": encoder, "decoder": decoder}
