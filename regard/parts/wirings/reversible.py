"""Reversible layers: two streams from whose final values all earlier ones can be recomputed, so that no activations are
stored.

    (a, b) <- (b, a + f(norm(b)))       for each branch in turn      backwards:  (p, q) -> (q - f(norm(p)), p)

Training memory does not grow with depth; the backward pass recomputes every branch with the same random numbers and the
same running statistics. Gomez et al. 2017, "RevNet", arXiv:1707.04585; Kitaev et al. 2020, "Reformer",
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
from regard.core.stack import Branch, LayerLike

TwoStreams = tuple[Tensor, Tensor]


class Reversible(Wiring):
    """join:  how the two streams are joined at the end: "concat", twice as wide, as in Reformer; "mean", for heads and
              tied embeddings of the model's own width.
    dropout:  dropout on the output of each branch.

    If a tap inside is watched, the layers are computed and stored as in other wirings. In half precision, cast inside
    the branches (autocast) and not the streams, which must be recovered exactly from their sums.
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

    def enter(self, x: Tensor) -> TwoStreams:
        return x, x

    def added(self, index: int, x: Tensor, branch: Branch, context: Context) -> Tensor:
        """Return what one branch adds to the stream."""
        return self.drop(branch(self.norms[index](x, context.valid)))

    def forward(self, stream: TwoStreams, branches: Sequence[Branch], context: Context) -> TwoStreams:
        a, b = stream
        for index, branch in enumerate(branches):
            a, b = b, a + self.added(index, b, branch, context)
        return a, b

    def leave(self, stream: TwoStreams, norm: Norm, context: Context) -> Tensor:
        x = torch.cat(stream, -1) if self.join == "concat" else (stream[0] + stream[1]) / 2
        return norm(x, context.valid)

    @classmethod
    def chain(cls, layers: Sequence[LayerLike], stream: TwoStreams, context: Context) -> TwoStreams:
        links = [Link(layer.wiring, index, mixer) for layer in layers for index, mixer in enumerate(layer.mixers)]  # type: ignore[arg-type]
        trainable = list(dict.fromkeys(p for link in links for p in link.trainable()))
        outside = tensors_with_grad(context)
        watched = any(isinstance(m, Tap) and m.watched for layer in layers for m in layer.modules())
        differentiable = any(t.requires_grad for t in (*stream, *outside, *trainable))
        if watched or not (torch.is_grad_enabled() and differentiable):
            return super().chain(layers, stream, context)
        return Chain.apply(links, context, len(outside), *stream, *outside, *trainable)


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

    def trainable(self) -> list[nn.Parameter]:
        found = (p for m in self.modules() for p in m.parameters(recurse=False) if p.requires_grad)
        return list(dict.fromkeys(found))  # a weight may have two owners

    def running_stats(self) -> list[Tensor]:
        """Return the running statistics that the norms of this branch update."""
        return [b for m in self.modules() if isinstance(m, Norm) and m.training for b in m.buffers()]


class LinkState(NamedTuple):
    """The random state and the running statistics before a link, to run it again."""

    random: list[Tensor]
    running_stats: list[Tensor]


class Chain(torch.autograd.Function):
    """Apply all links in order. It saves the two final streams; the backward pass recomputes the others."""

    @staticmethod
    def forward(
        ctx: Any, links: list[Link], context: Context, outside: int, a: Tensor, b: Tensor, *needed: Tensor
    ) -> TwoStreams:
        ctx.links, ctx.context = links, context
        ctx.trainable, ctx.autocast = needed[outside:], autocast_factory(a.device)
        ctx.before = []
        random = random_state(a.device)
        with ctx.autocast():
            for link in links:
                ctx.before.append(LinkState(random, [t.clone() for t in link.running_stats()]))
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
        context = replace_tensors(ctx.context, leaves)
        totals: dict[Tensor, Tensor] = {}
        for link, before in zip(reversed(ctx.links), reversed(ctx.before), strict=True):
            into = [*link.trainable(), *leaves]
            with torch.enable_grad(), ctx.autocast(), rewound(link, before, p.device):
                x = p.detach().requires_grad_()
                added = link.added(x, context)
            grad_x, *grads = torch.autograd.grad(added, (x, *into), grad_q.to(added.dtype), allow_unused=True)
            for tensor, grad in zip(into, grads, strict=True):
                if grad is not None:
                    totals[tensor] = totals[tensor] + grad if tensor in totals else grad
            p, q = q - added.detach(), p
            grad_p, grad_q = grad_q, grad_p if grad_x is None else grad_p + grad_x
        return None, None, None, grad_p, grad_q, *(totals.get(t) for t in (*leaves, *ctx.trainable))


@contextmanager
def rewound(link: Link, before: LinkState, device: torch.device) -> Iterator[None]:
    """Restore the random state and running statistics from before the link; on exit, set the current ones again."""
    random, running_stats = random_state(device), [t.clone() for t in link.running_stats()]
    set_random_state(before.random, device)
    set_running_stats(link, before.running_stats)
    try:
        yield
    finally:
        set_random_state(random, device)
        set_running_stats(link, running_stats)


def set_running_stats(link: Link, values: list[Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(link.running_stats(), values, strict=True):
            tensor.copy_(value)


def random_state(device: torch.device) -> list[Tensor]:
    """Return the states of the CPU's generator and of the device's generator."""
    own = [] if device.type in ("cpu", "meta") else [torch.get_device_module(device).get_rng_state(device)]
    return [torch.get_rng_state(), *own]


def set_random_state(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, device)


def autocast_factory(device: torch.device) -> Callable[[], AbstractContextManager]:
    """Return a function that makes the current autocast context. Its cache is off: links must not share cast
    weights."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype, enabled, cache_enabled=False)


def tensors_with_grad(context: Context) -> list[Tensor]:
    """Return the tensors of a context that require a gradient, such as the encoder's memory."""
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    map_context(context, collect)
    return found


def replace_tensors(context: Context, leaves: list[Tensor]) -> Context:
    """Return the context with its tensors that require a gradient replaced by `leaves`, in order."""
    remaining = iter(leaves)
    return map_context(context, lambda tensor: next(remaining) if tensor.requires_grad else tensor)


def map_context(context: Context, change: Callable[[Tensor], Tensor]) -> Context:
    values = {field.name: getattr(context, field.name) for field in fields(context)}
    return replace(context, **{n: map_tensors(v, change) for n, v in values.items() if isinstance(v, Tensor | tuple)})
