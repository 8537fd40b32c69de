"""Break something on purpose and see a law catch it: a law that cannot fail proves nothing.

Each mutation is the kind of slip that cached decoding is known for. All must be caught, and the code as it is must not.
"""

import pytest
import torch

import regard
from regard.core import Mixer, Place, part
from regard.core import context as contexts
from regard.core import pattern as patterns
from regard.core.mixer import under
from regard.core.pattern import Slots
from regard.kernels import cache, multihead
from regard.parts.patterns.causal import Causal
from regard.parts.patterns.window import Window
from regard.verify import laws


def make(**given) -> Mixer:
    torch.manual_seed(0)
    return part(Mixer, {"part": "attention", **given}, width=24, heads=3, place=Place())


def broken(mixer: Mixer) -> set[str]:
    """The laws that do not hold. A crash counts: it is as loud as a difference."""
    wrong = set()
    subject = laws.Subject(mixer)
    for law in (laws.alone, laws.cuts, laws.causal, laws.selects, laws.reorders, laws.joins, laws.gradients):
        torch.manual_seed(0)
        try:
            holds = law(subject).holds
        except (IndexError, RuntimeError, regard.UserError):
            holds = False
        if not holds:
            wrong.add(law.__name__)
    return wrong


def cache_off_by_one(patch):
    """Every key lands one slot too far."""
    real = multihead.write
    patch.setattr(multihead, "write", lambda cache, slot, new: real(cache, (slot + 1) % cache.shape[1], new))


def mask_off_by_one(patch):
    """A query may look one place ahead."""
    patch.setattr(Causal, "allows", lambda self, query_at, key_at: key_at <= query_at + 1)


def eviction_off_by_one(patch):
    """The cache drops a key one position too early, and chunks are one."""
    patch.setattr(Window, "keeps", lambda self, key_at, now: now - key_at < self.size - 1)
    patch.setattr(multihead, "CHUNK", 1)


def swapped_axis(patch):
    """Heads and channels of the keys are taken in the wrong order when stepping."""
    real = multihead.MultiHead._step

    def step(self, x, state, context):
        y, after = real(self, x, state, context)
        return y, after._replace(keys=after.keys.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2))

    patch.setattr(multihead.MultiHead, "_step", step)


def stale_position(patch):
    """Rows are believed to stand where the first one stands."""
    real = contexts.Context.after.__func__
    patch.setattr(
        contexts.Context,
        "after",
        classmethod(lambda cls, lengths, time, **known: real(cls, lengths[:1].expand_as(lengths), time, **known)),
    )


def padding_written(patch):
    """Columns that are not real are cached as if they were."""
    real = multihead.MultiHead._step
    patch.setattr(
        multihead.MultiHead,
        "_step",
        lambda self, x, state, context: real(self, x, state, contexts.Context(context.positions)),
    )


def slot_taken_twice(patch):
    """Two positions share a slot although both are still wanted."""
    real = multihead.slots

    def slots(pattern, length, chunk):
        where = real(pattern, length, chunk)
        return Slots(where.table // 2, where.counts, where.reused)

    patch.setattr(multihead, "slots", slots)


def holes_look_real(patch):
    """Where a batch is joined by one that holds less, what is not there counts as the first position."""
    patch.setattr(cache, "under", lambda tensors, nothing=0: under(tensors))


def sources_mixed_up(patch):
    """Rows that enter a batch look at the sources of those that were there."""
    patch.setattr(cache, "accumulate", lambda sizes, initial: [0 for _ in sizes])


MUTATIONS = [
    (cache_off_by_one, {}),
    (mask_off_by_one, {"kernel": "reference"}),
    (eviction_off_by_one, {"pattern": "causal & window(3)"}),
    (swapped_axis, {}),
    (stale_position, {"position": "rotary"}),
    (padding_written, {}),
    (slot_taken_twice, {"pattern": "causal & window(5)"}),
    (holes_look_real, {}),
    (sources_mixed_up, {"over": "memory"}),
]


@pytest.mark.parametrize(("mutation", "given"), MUTATIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_caught(mutation, given, monkeypatch):
    assert broken(make(**given)) == set(), "the unbroken code must obey"
    mutation(monkeypatch)
    expire()
    try:
        assert broken(make(**given)), f"{mutation.__name__}: {mutation.__doc__} Nothing noticed."
    finally:
        monkeypatch.undo()
        expire()


def expire() -> None:
    """Forget what was derived from the patterns while they were broken."""
    for remembered in vars(patterns).values():
        if hasattr(remembered, "cache_clear"):
            remembered.cache_clear()
