"""Break something on purpose and see a law catch it: a law that cannot fail proves nothing.

Each mutation is the kind of slip that cached decoding is known for. All must be caught, and the code as it is must not.
"""

import functools
from collections.abc import Callable

import pytest
import torch

import regard
from regard.bases import cache, multihead
from regard.core import Mixer, Place, part, state
from regard.core import context as contexts
from regard.core.mixer import pad_and_cat
from regard.decode import session as sessions
from regard.decode.session import Session, Snapshot
from regard.ops import dispatch
from regard.parts.patterns.causal import Causal
from regard.parts.patterns.window import Window
from regard.pattern import analysis as patterns
from regard.pattern.analysis import Slots
from regard.verify import edits, laws
from tests.models import shallow


def make(**given) -> Mixer:
    torch.manual_seed(0)
    return part(Mixer, {"part": "attention", **given}, width=24, heads=3, place=Place())


def broken(mixer: Mixer) -> set[str]:
    """The laws that do not hold. An exception counts as a violation."""
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
    """Every key is written one slot too far."""
    real = multihead.write
    patch.setattr(multihead, "write", lambda cache, slot, new: real(cache, (slot + 1) % cache.shape[1], new))


def mask_off_by_one(patch):
    """A query may attend to the next position."""
    patch.setattr(Causal, "allows", lambda self, query_at, key_at: key_at <= query_at + 1)


def eviction_off_by_one(patch):
    """The cache drops a key one position too early, with chunks of one position."""
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
    """All rows are treated as if they were at the position of the first row."""
    real = contexts.Context.after.__func__
    patch.setattr(
        contexts.Context,
        "after",
        classmethod(lambda cls, lengths, time, **known: real(cls, lengths[:1].expand_as(lengths), time, **known)),
    )


def padding_written(patch):
    """Padding is cached as if it were valid."""
    real = multihead.MultiHead._step
    patch.setattr(
        multihead.MultiHead,
        "_step",
        lambda self, x, state, context: real(self, x, state, contexts.Context(context.positions)),
    )


def slot_taken_twice(patch):
    """Two positions share a slot although both are still needed."""
    real = multihead.slots

    def slots(pattern, length, chunk):
        where = real(pattern, length, chunk)
        return Slots(where.table // 2, where.counts, where.reused)

    patch.setattr(multihead, "slots", slots)


def holes_look_real(patch):
    """When batches are joined, the empty slots of the smaller one count as position 0."""
    patch.setattr(cache, "pad_and_cat", lambda tensors, value=0: pad_and_cat(tensors))


def sources_mixed_up(patch):
    """Rows that join a batch attend to the sources of other rows."""
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
    """Clear caches that were derived from the patterns while they were broken."""
    for remembered in vars(patterns).values():
        if hasattr(remembered, "cache_clear"):
            remembered.cache_clear()


def long_steps_in_one_piece(patch):
    """A long step drops keys before the queries that need them."""
    patch.setattr(multihead, "pieces", lambda x, context, size: [(x, context)])


def tables_of_slots_written_in_place(patch):
    """Layers see what an earlier layer wrote into a slot table for later positions, and take it for their own."""
    patch.setattr(multihead, "written_copy", multihead.write)
    patch.setattr(multihead, "_same", lambda one, two: (one is None) == (two is None))


def steps_that_drop_nothing(patch):
    """The fused step is taken in training mode."""
    real = Session._step_fused

    def step_fused(self, x, state, context):
        modules = [module for module in self.model.modules() if module.training]
        for module in modules:
            module.training = False
        try:
            return real(self, x, state, context)
        finally:
            for module in modules:
                module.training = True

    patch.setattr(Session, "_step_fused", step_fused)


def steps_without_gradients(patch):
    """The fused step is taken where weights require gradients, but the input does not."""
    real = Session._step_fused

    def step_fused(self, x, state, context):
        with torch.no_grad():
            return real(self, x, state, context)

    patch.setattr(Session, "_step_fused", step_fused)


def states_that_share_buffers(patch):
    """Every state writes into the buffers of the one before it."""
    patch.setattr(regard.core.Model, "_with_free_buffers", lambda self, state: state)


def old_states_that_lost_keys(patch):
    """A cache that drops keys is treated as if it kept all."""
    patch.setattr(multihead.MultiHead, "can_return", lambda self, begin, end: True)


def plans_of_another_model(patch):
    """The plan of a fused step is never renewed."""
    patch.setattr(Snapshot, "holds", lambda self: True)


def copies_that_forget_what_was_lost(patch):
    """A copy of a state is treated as if it had lost no keys."""
    patch.setattr(state.Version, "may_be_overwritten", property(lambda self: not self.is_newest))


def steps_that_hooks_do_not_see(patch):
    """Hooks do not fire in steps."""
    patch.setattr(contexts, "hooked", lambda module: False)


def steps_that_replace_methods(patch):
    """A fused step is taken although the step of a mixer was replaced."""
    patch.setattr(dispatch, "is_replaced", lambda own, method: method == "forward" and method in own)


def keys_written_in_place(patch):
    """Keys without gradient are overwritten although the backward pass needs their old values."""
    real = cache.write

    def write(cache, slot, new):
        if new.requires_grad or cache.requires_grad:
            return real(cache, slot, new)
        with torch.no_grad():
            return real(cache, slot, new)

    patch.setattr(multihead, "write", write)


def biases_side_by_side(patch):
    """A bias is treated as contiguous."""
    patch.setattr(sessions, "is_contiguous", lambda weight, *more: weight.is_contiguous())
    patch.setattr(torch.Tensor, "contiguous", lambda self: self)


OF_MODELS = [
    (long_steps_in_one_piece, "local", laws.long),
    (tables_of_slots_written_in_place, "transformer-xl", laws.long),
    (steps_that_drop_nothing, "gpt2", laws.drops),
    (steps_without_gradients, "gpt2", laws.long_gradients),
    (states_that_share_buffers, "gpt2", laws.branches),
    (old_states_that_lost_keys, "local", laws.branches),
    (plans_of_another_model, "gpt2", edits.edited),
    (biases_side_by_side, "gpt2", edits.edited),
    (copies_that_forget_what_was_lost, "local", laws.branches),
    (steps_that_hooks_do_not_see, "gpt2", edits.edited),
    (steps_that_replace_methods, "gpt2", edits.edited),
    (keys_written_in_place, "gpt2", laws.long_gradients),
]


def holds(name: str, law: Callable[[laws.Subject], laws.Finding]) -> bool:
    """Return whether a recipe obeys a law. An exception counts as a violation."""
    torch.manual_seed(0)
    subject = laws.Subject(shallow(name))
    try:
        return law(subject).holds
    except (IndexError, KeyError, RuntimeError, regard.UserError):
        return False


holds_unbroken = functools.cache(holds)  # several mutations are of the same recipe and for the same law


@pytest.mark.parametrize(("mutation", "name", "law"), OF_MODELS, ids=lambda value: getattr(value, "__name__", ""))
def test_caught_in_models(mutation, name, law, monkeypatch):
    assert holds_unbroken(name, law), "the unbroken code must obey"
    mutation(monkeypatch)
    assert not holds(name, law), f"{mutation.__name__}: {mutation.__doc__} Nothing noticed."
