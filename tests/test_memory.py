"""How much memory a model takes is known before it is taken, and a machine that has less refuses it."""

import pytest

import regard
from regard import UserError, memory
from regard.core.recipe import _assemble
from regard.files import recipe


@pytest.mark.parametrize("name", recipe.names())
def test_the_estimate_is_what_a_model_takes(name, monkeypatch):
    monkeypatch.setattr(memory, "SMALL", 0)
    made = recipe.load(name, "tiny" if "tiny" in recipe.sizes(name) else recipe.sizes(name)[0])
    made.setdefault("vocab", 61)
    for stack, _, depth in memory.stacks(made["model"]):
        stack["depth"] = min(depth + 1, 5)
    found = memory.model_bytes(made, _assemble)
    model = regard.build(made)
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    whole = sum(tensor.nbytes for tensor in tensors.values())
    assert 0.9 * whole <= found <= 1.1 * whole


def test_a_model_that_the_machine_cannot_hold_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "machine_memory", lambda: 16 * 10**9)
    with pytest.raises(UserError) as told:
        regard.build("llama", size="2-13b", vocab=32000)
    assert "takes 52.1 GB of memory, and this machine has 16.0 GB" in str(told.value)
    with pytest.raises(UserError, match=r"takes .* of memory, and this machine has 16\.0 GB"):
        regard.build("gpt2", size="tiny", vocab=97, overrides=["model.width=65536", "model.heads=64"])


def test_a_large_model_can_still_be_drawn(monkeypatch):
    from regard.look.sketch import build_without_weights, parameters_of_recipe

    monkeypatch.setattr(memory, "machine_memory", lambda: 10**9)
    made = recipe.load("llama", "2-13b") | {"vocab": 32000}
    assert 13.0e9 < parameters_of_recipe(made) < 13.1e9
    assert build_without_weights(made).width == 5120


def test_a_limit_of_the_process_counts(monkeypatch):
    monkeypatch.setattr(memory.resource, "getrlimit", lambda what: (123_456, -1))
    assert memory.machine_memory() == 123_456


def test_bytes_are_told_in_units_that_are_read():
    assert [memory.format_bytes(n) for n in (0, 999, 1234, 5 * 10**9, 10**30)] == [
        "0 bytes", "999 bytes", "1.2 kB", "5.0 GB", "1,000,000,000,000.0 EB",
    ]  # fmt: skip
