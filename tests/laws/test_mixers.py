"""The laws, over every mixer and feed-forward found in parts/, in every variant that it names."""

import pytest
import torch

from regard.core import Mixer, Place, part
from regard.core.parts import find, names
from regard.verify import laws

VARIANTS = [(name, index) for name in names(Mixer) for index in range(len(find(Mixer, name).examples))]


def make(name: str, index: int) -> Mixer:
    torch.manual_seed(index)
    spec = {"part": name, **find(Mixer, name).examples[index]}
    return part(Mixer, spec, width=24, heads=3, depth=2, place=Place(encoder=1, decoder=2, memory=24))


@pytest.mark.parametrize(("name", "index"), VARIANTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_laws(name, index, seed):
    for finding in laws.check(make(name, index), seed):
        assert finding.holds, f"{finding.law}: {finding.worst:.2e} > {finding.limit:.0e} ({finding.detail})"


@pytest.mark.parametrize(("name", "index"), VARIANTS)
def test_one_position(name, index):
    """A sequence of one is a sequence."""
    subject = laws.Subject(make(name, index))
    x, memory = subject.inputs(2, 1), subject.memory(2)
    y = subject.whole(x, None, memory)
    assert y.shape == (2, 1, subject.module.out_width)
    assert bool(torch.isfinite(y).all())
