"""Reversible layers: two streams from whose end every earlier point can be computed, so that nothing is kept.

    (a, b) <- (b, a + f(norm(b)))       for each branch in turn      backwards:  (p, q) -> (q - f(norm(p)), p)

Training memory does not grow with depth; every branch is computed once more on the way back, with the same random
numbers and the same running statistics. Gomez et al. 2017, "RevNet", arXiv:1707.04585; Kitaev et al. 2020, "Reformer",
arXiv:2001.04451.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regard.core import Context, Dropout, Mixer, Norm, Tap, UserError, Wiring, part
from regard.core.mixer import map_tensors
from regard.core.wiring import Branch, LayerLike

Two = tuple[Tensor, Tensor]


class Reversible(Wiring):
    """join:  how the two streams become one at the end: "concat", twice as wide, as in Reformer; "mean", for heads
              and tied embeddings of the model's own width.
    dropout:  of what a branch adds.

    A watched tap inside needs the ordinary graph: the layers are then computed, and kept, as those of other wirings.
    In half precision, cast inside the branches (autocast) and not the streams: they must be found again from their sum.
    """

    examples = ({}, {"norm": "rms", "join": "concat"})
    lanes = 2

    def __init__(
        self,
        width: int,
        branches: int,
        norm: Norm | str | dict = "layer",
        join: str = "mean",
        dropout: float = 0.0,
    ):
        super().__init__()
        if join not in ("mean", "concat"):
            raise UserError(f"join must be 'mean' or 'concat', not '{join}'")
        self.join = join
        self.norms = nn.ModuleList(part(Norm, norm, width=width) for _ in range(branches))
        self.drop = Dropout(dropout)

    def out_width(self, width: int) -> int:
        return 2 * width if self.join == "concat" else width

    def enter(self, x: Tensor) -> Two:
        return x, x

    def added(self, index: int, x: Tensor, branch: Branch, context: Context) -> Tensor:
        """What one branch adds."""
        return self.drop(branch(self.norms[index](x, context.valid)))

    def forward(self, stream: Two, branches: Sequence[Branch], context: Context) -> Two:
        a, b = stream
        for index, branch in enumerate(branches):
            a, b = b, a + self.added(index, b, branch, context)
        return a, b

    def leave(self, stream: Two, norm: Norm, context: Context) -> Tensor:
        x = torch.cat(stream, -1) if self.join == "concat" else (stream[0] + stream[1]) / 2
        return norm(x, context.valid)

    @classmethod
    def chain(cls, layers: Sequence[LayerLike], stream: Two, context: Context) -> Two:
        links = [Link(layer.wiring, index, mixer) for layer in layers for index, mixer in enumerate(layer.mixers)]  # type: ignore[arg-type]
        learned = list(dict.fromkeys(p for link in links for p in link.learned()))
        outside = wanted(context)
        watched = any(isinstance(m, Tap) and m.watched for layer in layers for m in layer.modules())
        differentiable = any(t.requires_grad for t in (*stream, *outside, *learned))
        if watched or not (torch.is_grad_enabled() and differentiable):
            return super().chain(layers, stream, context)
        return Chain.apply(links, context, len(outside), *stream, *outside, *learned)


class Link(NamedTuple):
    """One branch of one layer."""

    wiring: Reversible
    index: int
    mixer: Mixer

    def added(self, x: Tensor, context: Context) -> Tensor:
        return self.wiring.added(self.index, x, lambda y: self.mixer(y, context), context)

    def modules(self) -> Iterator[nn.Module]:
        yield from self.wiring.norms[self.index].modules()
        yield from self.mixer.modules()

    def learned(self) -> list[nn.Parameter]:
        found = (p for m in self.modules() for p in m.parameters(recurse=False) if p.requires_grad)
        return list(dict.fromkeys(found))  # a weight may have two owners

    def running(self) -> list[Tensor]:
        """The statistics that this branch's norms change as they go."""
        return [b for m in self.modules() if isinstance(m, Norm) and m.training for b in m.buffers()]


class Before(NamedTuple):
    """What a link would find if it came again."""

    random: list[Tensor]
    running: list[Tensor]


class Chain(torch.autograd.Function):
    """All links in order. Keeps the two streams at the end; the backward finds the others."""

    @staticmethod
    def forward(
        ctx: Any, links: list[Link], context: Context, outside: int, a: Tensor, b: Tensor, *needed: Tensor
    ) -> Two:
        ctx.links, ctx.context = links, context
        ctx.learned, ctx.casting = needed[outside:], casting(a.device)
        ctx.before = []
        random = random_state(a.device)
        with ctx.casting():
            for link in links:
                ctx.before.append(Before(random, [t.clone() for t in link.running()]))
                a, b = b, a + link.added(b, context)
                now = random_state(a.device)
                random = now if any(not torch.equal(x, y) for x, y in zip(now, random, strict=True)) else random
        ctx.save_for_backward(a, b, *needed[:outside])
        return a, b

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_p: Tensor, grad_q: Tensor) -> tuple:
        p, q, *outside = ctx.saved_tensors
        leaves = [t.detach().requires_grad_() for t in outside]
        context = swap(ctx.context, leaves)
        totals: dict[Tensor, Tensor] = {}
        for link, before in zip(reversed(ctx.links), reversed(ctx.before), strict=True):
            into = [*link.learned(), *leaves]
            with torch.enable_grad(), ctx.casting(), again(link, before, p.device):
                x = p.detach().requires_grad_()
                added = link.added(x, context)
            grad_x, *grads = torch.autograd.grad(added, (x, *into), grad_q.to(added.dtype), allow_unused=True)
            for tensor, grad in zip(into, grads, strict=True):
                if grad is not None:
                    totals[tensor] = totals[tensor] + grad if tensor in totals else grad
            p, q = q - added.detach(), p
            grad_p, grad_q = grad_q, grad_p if grad_x is None else grad_p + grad_x
        return None, None, None, grad_p, grad_q, *(totals.get(t) for t in (*leaves, *ctx.learned))


@contextmanager
def again(link: Link, before: Before, device: torch.device) -> Iterator[None]:
    """Inside, random numbers and running statistics are those from before; afterwards, those of now."""
    random, running = random_state(device), [t.clone() for t in link.running()]
    set_random_state(before.random, device)
    set_running(link, before.running)
    try:
        yield
    finally:
        set_random_state(random, device)
        set_running(link, running)


def set_running(link: Link, values: list[Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(link.running(), values, strict=True):
            tensor.copy_(value)


def random_state(device: torch.device) -> list[Tensor]:
    """Of the CPU's generator and of the device's own."""
    own = [] if device.type in ("cpu", "meta") else [torch.get_device_module(device).get_rng_state(device)]
    return [torch.get_rng_state(), *own]


def set_random_state(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, device)


def casting(device: torch.device) -> Callable[[], AbstractContextManager]:
    """Makes the mixed precision of this moment. Its cache is off: a weight cast in one link's graph is no other's."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype, enabled, cache_enabled=False)


def wanted(context: Context) -> list[Tensor]:
    """The tensors of a context that want a gradient: the encoder's memory."""
    found: list[Tensor] = []

    def look(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    walk(context, look)
    return found


def swap(context: Context, leaves: list[Tensor]) -> Context:
    """The same context with its `wanted` tensors replaced, in order."""
    left = iter(leaves)
    return walk(context, lambda tensor: next(left) if tensor.requires_grad else tensor)


def walk(context: Context, change: Callable[[Tensor], Tensor]) -> Context:
    held = {field.name: getattr(context, field.name) for field in fields(context)}
    return replace(context, **{n: map_tensors(v, change) for n, v in held.items() if isinstance(v, Tensor | tuple)})
