"""The contract of how a layer's branches join the stream: pre-norm, post-norm, parallel, reversible."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from .context import Context
from .mixer import Mixer
from .norm import Norm
from .position import Position

Branch = Callable[[Tensor], Tensor]
Stream = Any  # what runs through the layers: a tensor, or a tuple of them for wirings with two streams


@dataclass(frozen=True)
class Place:
    """Where in a model something stands. Inherited by the parts that ask for it."""

    side: str = "decoder"  # or "encoder"
    encoder: int = 0  # layers of the encoder, 0 when there is none
    decoder: int = 1
    memory: int | None = None  # width of the encoder's output, when there is an encoder
    position: Position | None = None  # the stack's shared position, for parts that name theirs "shared"
    index: int = 0  # which layer of its stack it is, counted from 0
    shared: dict[Any, nn.Parameter] = field(default_factory=dict, compare=False)  # weights that all layers share


class LayerLike(Protocol):
    """One layer as `chain` sees it."""

    wiring: "Wiring"

    @property
    def mixers(self) -> list[Mixer]: ...

    def __call__(self, stream: Stream, context: Context) -> Stream: ...

    def modules(self) -> Iterator[nn.Module]: ...


class Wiring(nn.Module):
    """Joins `branches` mixers to the stream of one layer.

    residual: branches must keep the width, since they are added to the stream.
    lanes:    tensors in the stream; where there are two, the stream is a tuple. The same for all layers of a stack.
    """

    folder: ClassVar[tuple[str, ...]] = ("wirings",)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    residual: bool = True
    lanes: int = 1

    def out_width(self, width: int) -> int:
        """Channels that leave a stack whose layers have `width`; the stack's norm has as many."""
        return width

    def enter(self, x: Tensor) -> Stream:
        """The stream before the first layer."""
        return x

    def forward(self, stream: Stream, branches: Sequence[Branch], context: Context) -> Stream:
        raise NotImplementedError

    def norms_around(self, index: int) -> tuple[Norm | None, Norm | None] | None:
        """Return the two norms where all that happens to a branch is x <- after(x + f(before(x))); None: more does."""
        return None

    def leave(self, stream: Stream, norm: Norm, context: Context) -> Tensor:
        """The stack's output; `norm` is the stack's own, none unless the recipe asks."""
        return norm(stream, context.valid)

    def prepare(self, mixer: Mixer) -> None:
        """Once, at birth: scale a branch's weights (`value_path`), or fill its slot `norm`, which stands before its
        last map `out`."""

    @classmethod
    def chain(cls, layers: Sequence[LayerLike], stream: Stream, context: Context) -> Stream:
        """All layers in order, whole sequences. Reversible wirings override it, to keep nothing per layer."""
        for layer in layers:
            stream = layer(stream, context)
        return stream
