"""The laws, over every recipe: it builds, obeys, trains one step, saves, and loads to the same outputs.

That every size of a recipe builds is tested where its parameters are counted, in tests/cli/test_cli.py."""

import pytest
import torch

import regard
from regard.core import models_in
from regard.files import recipe
from regard.verify import laws
from tests.models import shallow

NAMES = recipe.names()


def make(name: str):
    torch.manual_seed(0)
    return shallow(name)


@pytest.mark.parametrize("name", NAMES)
def test_laws(name):
    for finding in laws.check(make(name)):
        assert finding.holds, f"{finding.law}: {finding.worst:.2e} > {finding.limit:.0e} ({finding.detail})"


@pytest.mark.parametrize("name", NAMES)
def test_cuts_in_float32(name):
    """In float32: only rounding may differ."""
    for model in models_in(make(name)).values():
        subject = laws.Subject(model)
        if not subject.streams:
            continue
        model.float().eval()
        time = min(150, model.limit or 150)
        x, given = model.random_inputs(3, time).pop("tokens"), {}
        with torch.no_grad():
            if model.source_embed is not None:
                given["memory"] = model.encode(model.source_embed.random_input(3, 7))
            whole, state, parts, begin = model(x, **given), model.start(3, time, **given), [], 0
            for size in (time - 20, 1, 1, 1, 2, time):
                y, state = model.step(x[:, begin : begin + size], state)
                parts.append(y)
                begin += size
        assert whole.dtype == torch.float32
        assert laws.max_difference(torch.cat(parts, 1), whole) < 2e-4


@pytest.mark.parametrize("name", NAMES)
def test_learns_one_step(name):
    """One step down the gradient makes the loss on the same batch smaller."""
    torch.manual_seed(0)
    model = regard.build(name, size="tiny", vocab=61).eval()  # no dropout between the two losses
    given = model.random_inputs(3, 13)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        scores = model(**given)
        target = torch.arange(scores[..., 0].numel()) % scores.shape[-1]
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, -2), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_saves_and_loads(name, tmp_path):
    """Also after a training step: nothing derived from the old weights remains."""
    model = make(name).eval()
    given = model.random_inputs(2, 13)
    with torch.no_grad():
        before = model(**given)
    model(**given).square().mean().backward()
    torch.optim.Adam(model.parameters(), 0.01, fused=True).step()  # tells no version of the weights
    regard.save(model, tmp_path / "model")
    drawn = torch.get_rng_state()
    again = regard.restore(tmp_path / "model").eval()
    assert torch.equal(torch.get_rng_state(), drawn)  # which is the host's
    assert all(torch.equal(now, dict(model.named_buffers())[name]) for name, now in again.named_buffers())
    with torch.no_grad():
        after = model(**given)
        assert torch.equal(after, again(**given))
    assert not torch.equal(after, before)
    assert again.recipe == model.recipe
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["model.safetensors", "recipe.toml"]
