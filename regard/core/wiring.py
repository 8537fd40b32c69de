"""The contract of wirings, which join a layer's branches to the residual stream: pre-norm, post-norm, reversible."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from .context import Context
from .mixer import Mixer
from .norm import Norm
from .position import Position

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

    wiring: "Wiring"

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
