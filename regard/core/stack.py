"""Layers, and a stack of them: branches joined by a wiring, several kinds of layer cycling over the depth. With the
contract of wirings: pre-norm, post-norm, parallel, reversible."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.errors import UserError
from regard.schema import name_of, part, takes

from .context import Collected, Context, Steps, Tap
from .contracts import Norm, Position
from .mixer import Cost, Mixer

Branch = Callable[[Tensor], Tensor]
Stream = Any  # the residual stream: a tensor, or a tuple of them for wirings with two streams


@dataclass(frozen=True)
class Place:
    """Where in a model a part is. Given to the parts whose constructors take a `place`."""

    side: str = "decoder"  # or "encoder"
    encoder: int = 0  # number of encoder layers, 0 when there is no encoder
    decoder: int = 1  # number of decoder layers
    memory: int | None = None  # width of the encoder's output, when there is an encoder
    position: Position | None = None  # the stack's shared position, for parts that name theirs "shared"
    index: int = 0  # of the layer in its stack, from 0
    shared: dict[Any, nn.Parameter] = field(default_factory=dict, compare=False)  # weights that all layers share


class LayerLike(Protocol):
    """What `chain` needs of a layer."""

    wiring: Wiring

    @property
    def mixers(self) -> list[Mixer]: ...

    def __call__(self, stream: Stream, context: Context) -> Stream: ...

    def modules(self) -> Iterator[nn.Module]: ...


class Wiring(nn.Module):
    """Joins `branches` mixers to the stream of one layer.

    residual: branches must keep the width, since they are added to the stream.
    lanes:    number of tensors in the stream; two make it a tuple. The same for all layers of a stack.
    """

    folder: ClassVar[tuple[str, ...]] = ("wirings",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    residual: bool = True
    lanes: int = 1

    def out_width(self, width: int) -> int:
        """Return the output channels of a stack whose layers have `width`, which are also those of its norm."""
        return width

    def enter(self, x: Tensor) -> Stream:
        """Return the stream before the first layer."""
        return x

    def forward(self, stream: Stream, branches: Sequence[Branch], context: Context) -> Stream:
        raise NotImplementedError

    def norms_around(self, index: int) -> tuple[Norm | None, Norm | None] | None:
        """Return the norms (before, after) where a branch is applied as x <- after(x + f(before(x))); or None."""
        return None

    def leave(self, stream: Stream, norm: Norm, context: Context) -> Tensor:
        """Return the stack's output; `norm` is the stack's last norm."""
        return norm(stream, context.valid)

    def prepare(self, mixer: Mixer) -> None:
        """Change a branch once, at initialization: scale its weights (`value_path`), or fill its slot `norm`, which is
        applied before its last projection `out`."""

    @classmethod
    def chain(cls, layers: Sequence[LayerLike], stream: Stream, context: Context) -> Stream:
        """Run all layers in order over whole sequences. Reversible wirings override it, to save nothing per layer."""
        for layer in layers:
            stream = layer(stream, context)
        return stream


class Layer(Steps):
    """Mixers in the order of the recipe, and the wiring that joins them to the residual stream."""

    def __init__(self, branches: dict[str, Mixer], wiring: Wiring):
        super().__init__()
        self.branches = nn.ModuleDict(branches)
        self.wiring = wiring
        self.out = Tap()
        for mixer in branches.values():
            wiring.prepare(mixer)

    @property
    def mixers(self) -> list[Mixer]:
        return list(self.branches.values())  # type: ignore[arg-type]

    def calls(self, context: Context) -> list[Branch]:
        """Return the branches as functions of their input, for whole sequences."""
        collected, context = context.collected, replace(context, collected=None)

        def call(mixer: Mixer) -> Branch:
            def run(x: Tensor) -> Tensor:
                y, state = mixer.step(x, mixer.start(context, x.shape[1]), context)
                collected.final_states.append(state)  # type: ignore[union-attr]
                return y

            return partial(mixer, context=context) if collected is None or not mixer.exports_state else run

        return [call(mixer) for mixer in self.mixers]

    def forward(self, stream: Stream, context: Context) -> Stream:
        return self._out(self.wiring(stream, self.calls(context), context))

    def start(self, context: Context, capacity: int) -> tuple:
        return tuple(mixer.start(context, capacity) for mixer in self.mixers)

    def step(self, stream: Stream, state: tuple, context: Context) -> tuple[Stream, tuple]:
        after = list(state)

        def call(index: int, mixer: Mixer) -> Branch:
            def run(x: Tensor) -> Tensor:
                y, after[index] = mixer.step(x, state[index], context)
                return y

            return run

        stream = self.wiring(stream, [call(i, mixer) for i, mixer in enumerate(self.mixers)], context)
        return self._out(stream), tuple(after)

    def _out(self, stream: Stream) -> Stream:
        if self.out.watched:
            self.out(stream[0] if isinstance(stream, tuple) else stream)
        return stream


class CheckpointedLayer:
    """A layer that saves only its input and is computed again in the backward pass, with the same random numbers and
    the same running statistics."""

    def __init__(self, layer: Layer):
        self.layer, self.wiring, self.mixers, self.modules = layer, layer.wiring, layer.mixers, layer.modules

    def __call__(self, stream: Stream, context: Context) -> Stream:
        running = [b for m in self.modules() if isinstance(m, Norm) and m.training for b in m.buffers()]
        before = [b.clone() for b in running]
        second = partial(_restored_statistics, running, before) if running else nullcontext
        return checkpoint(
            self.layer, stream, context, use_reentrant=False, context_fn=lambda: (nullcontext(), second())
        )


@contextmanager
def _restored_statistics(running: list[Tensor], before: list[Tensor]) -> Iterator[None]:
    """Inside, the running statistics are those from before; afterwards, the current ones again."""
    now = [b.clone() for b in running]
    _copy_into(running, before)
    try:
        yield
    finally:
        _copy_into(running, now)


def _copy_into(tensors: list[Tensor], values: list[Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


class Stack(Steps):
    """`depth` layers and a last norm.

    layer:    a list of tables, cycling over the depth. In a table, `wiring` is the wiring and every other key is a
              branch, in the order written: mixer, cross, feedforward, or any other name.
    norm:     applied after the last layer.
    position: one position part shared by all layers; a branch uses it by `position = "shared"`.
    share:    "layers": all layers of a kind are one and the same (ALBERT); "none".

    gradient_checkpointing: set it to save only the input of each layer and compute the layer again in the backward pass
              (Chen et al. 2016, arXiv:1604.06174). Wirings with their own way to save memory keep it.
    """

    gradient_checkpointing = False

    def __init__(
        self,
        width: int,
        depth: int,
        layer: list | dict,
        heads: int = 1,
        norm: Norm | str | dict = "none",
        position: Position | str | dict = "none",
        share: str = "none",
        dropout: float = 0.0,
        place: Place | None = None,
    ):
        super().__init__()
        kinds = [layer] if isinstance(layer, dict) else list(layer)
        if not kinds or depth < 1:
            raise UserError("a stack needs at least one layer")
        if share not in ("none", "layers"):
            raise UserError(f"share must be 'none' or 'layers', not '{share}'")
        place = place or Place(decoder=depth)
        self.position = part(Position, position, width=width, heads=heads, dim=width // heads)
        place = replace(place, position=self.position)
        self.shared = place.shared
        made: list[Layer] = []
        for index in range(depth):
            kind = index % len(kinds)
            if share == "layers" and index >= len(kinds):
                made.append(made[kind])
                continue
            inherited = {"heads": heads, "depth": depth, "dropout": dropout, "place": replace(place, index=index)}
            try:
                made.append(_layer(kinds[kind], width, inherited))
            except UserError as error:
                raise error.inside(f"[{kind}]").inside("layer") from error.__cause__
            after = made[-1].mixers[-1].out_width if not made[-1].wiring.residual else width
            if share == "layers" and after != width and depth > 1:
                raise UserError(f"a layer that turns width {width} into {after} cannot be shared", ("share",))
            width = after
        wirings = {type(layer.wiring): name_of(layer.wiring) for layer in made}
        if len(wirings) > 1 and any(wiring.lanes > 1 for wiring in wirings):
            found = ", ".join(f"'{name}'" for name in sorted(wirings.values()))
            raise UserError(f"a wiring with two streams needs the whole stack, and here are {found}", ("layer",))
        self.layers = nn.ModuleList(made)
        self.kinds = len(kinds)
        self.width = width = made[0].wiring.out_width(width)
        if position != "none" and not any(m is self.position for m in self.layers.modules()):
            raise UserError("no branch takes it: say position = 'shared' in the mixers that should", ("position",))
        self.norm = part(Norm, norm, width=width)

    @property
    def streams(self) -> bool:
        return all(mixer.streams for layer in self._layers for mixer in layer.mixers)

    def check_streams(self) -> None:
        """Raise a UserError that names the first branch that looks ahead, if there is one."""
        for index, layer in enumerate(self._layers):
            for name, mixer in layer.branches.items():
                if not mixer.streams:
                    where = ("layer", f"[{index % self.kinds}]", name)
                    if not takes(type(mixer), "pattern"):
                        why = f"mixer '{name_of(mixer)}', as it is made here, looks ahead"
                        raise UserError(f"{why}, and a decoder must not: choose one that streams", where)
                    raise UserError(
                        f"pattern '{getattr(mixer, 'pattern', None)}' looks ahead, and a decoder must not: add "
                        "'causal &' to the pattern, or choose a mixer that streams; one that writes all tokens at once "
                        "also needs to know how many: model.length, such as 'classifier', 'ratio' or 'fertility'",
                        where,
                    )

    @property
    def _layers(self) -> Sequence[Layer]:
        return list(self.layers)  # type: ignore[arg-type]

    def forward(self, x: Tensor, context: Context) -> Tensor:
        first = self._layers[0].wiring
        stream = first.enter(x)
        kinds = {type(layer.wiring) for layer in self._layers}
        chain = first.chain if len(kinds) == 1 and context.collected is None else Wiring.chain
        layers = [CheckpointedLayer(layer) for layer in self._layers] if self._checkpoints else self._layers
        if context.collected is None or context.collected.layer_outputs is None:
            return first.leave(chain(layers, stream, context), self.norm, context)
        for layer in layers:
            stream = layer(stream, context)
            context.collected.layer_outputs.append(first.leave(stream, self.norm, context))
        return context.collected.layer_outputs[-1]

    @property
    def _checkpoints(self) -> bool:
        return self.gradient_checkpointing and self.training and torch.is_grad_enabled()

    def forward_with_states(
        self, x: Tensor, context: Context, layer_outputs: bool = False
    ) -> tuple[Tensor, tuple, tuple[Tensor, ...]]:
        """Return `forward`, the last states of the mixers with `exports_state`, and with `layer_outputs` also the
        output that the stack would give if it ended after each of its layers, the last one included."""
        if not layer_outputs and not any(mixer.exports_state for layer in self._layers for mixer in layer.mixers):
            return self(x, context), (), ()
        collected = Collected(layer_outputs=[] if layer_outputs else None)
        y = self(x, replace(context, collected=collected))
        return y, tuple(collected.final_states), tuple(collected.layer_outputs or ())

    def start(self, context: Context, capacity: int) -> tuple:
        return tuple(layer.start(context, capacity) for layer in self._layers)

    def step(self, x: Tensor, state: tuple, context: Context) -> tuple[Tensor, tuple]:
        first = self._layers[0].wiring
        stream = first.enter(x)
        after = []
        for layer, layer_state in zip(self._layers, state, strict=True):
            stream, new = layer.step(stream, layer_state, context)
            after.append(new)
        return first.leave(stream, self.norm, context), tuple(after)

    def reorder(self, state: tuple, rows: Tensor) -> tuple:
        """Return `select(state, rows)`, and give `state` up."""
        shared: dict = {}
        return tuple(
            tuple(mixer.reorder(own, rows, shared) for mixer, own in zip(layer.mixers, part_state, strict=True))
            for layer, part_state in zip(self._layers, state, strict=True)
        )

    def cost(self, length: int, past: int = 0) -> Cost:
        costs = [mixer.cost(length, past) for layer in self._layers for mixer in layer.mixers]
        return Cost(sum(c.flops for c in costs), sum(c.state for c in costs))


def _layer(table: Any, width: int, inherited: dict[str, Any]) -> Layer:
    if not isinstance(table, dict):
        raise UserError(f"a layer is a table of branches, not {table!r}")
    specs = {name: spec for name, spec in table.items() if name != "wiring"}
    if not specs:
        raise UserError("a layer needs at least one branch, such as 'mixer = { part = \"attention\" }'")
    branches: dict[str, Mixer] = {}
    wiring = part(Wiring, table.get("wiring", "pre"), width=width, branches=len(specs), **inherited)
    stream = width
    for name, spec in specs.items():
        try:
            mixer = part(Mixer, spec, width=stream, **inherited)
        except UserError as error:
            raise UserError(error.message, (name, *error.path[1:])) from error.__cause__
        if mixer.out_width != stream and wiring.residual:
            raise UserError(
                f"turns width {stream} into {mixer.out_width}, which only wiring 'plain' allows, not "
                f"'{name_of(wiring)}'",
                (name,),
            )
        branches[name], stream = mixer, mixer.out_width
    return Layer(branches, wiring)
