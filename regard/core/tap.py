"""Named identity modules that can be watched: attention weights, losses and hidden states without extra outputs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch

from torch import Tensor, nn


class Tap(nn.Module):
    """Returns its input. A watcher may read it, or replace it by returning a tensor."""

    def __init__(self):
        super().__init__()
        self.watchers: list[Callable[[Tensor], Tensor | None]] = []

    @property
    def watched(self) -> bool:
        return bool(self.watchers)

    def forward(self, x: Tensor) -> Tensor:
        for watcher in self.watchers:
            changed = watcher(x)
            x = x if changed is None else changed
        return x


@contextmanager
def watch(
    model: nn.Module, name: str = "*weights", edit: Callable[[str, Tensor], Tensor | None] | None = None
) -> Iterator:
    """Collect, by tap name, every tensor that passes the taps matching `name` (a shell-style wildcard).

    with watch(model, "decoder*weights") as seen:
        model(...)
    seen["decoder.layers.0.branches.cross.attend.weights"]   # a list, one tensor per call
    """
    seen: dict[str, list[Tensor]] = {}
    added: list[tuple[Tap, Callable]] = []
    for path, tap in model.named_modules():
        if isinstance(tap, Tap) and fnmatch(path, name):

            def watcher(x: Tensor, path: str = path) -> Tensor | None:
                seen.setdefault(path, []).append(x)
                return edit(path, x) if edit else None

            tap.watchers.append(watcher)
            added.append((tap, watcher))
    try:
        yield seen
    finally:
        for tap, watcher in added:
            tap.watchers.remove(watcher)


@contextmanager
def losses(model: nn.Module) -> Iterator[Callable[[], Tensor | float]]:
    """Yield a function that returns the auxiliary loss: the sum of all that passed the model's taps named `loss`, or 0.

    with losses(model) as auxiliary:
        logits = model(tokens)
    (cross_entropy(logits, target) + auxiliary()).backward()
    """
    with watch(model, "loss") as own, watch(model, "*.loss") as inner:

        def total() -> Tensor | float:
            passed = [x for seen in (own, inner) for one in seen.values() for x in one]
            return sum(passed[1:], start=passed[0]) if passed else 0.0

        yield total
