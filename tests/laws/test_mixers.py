"""The laws, over every mixer and feed-forward found in parts/, in every variant that it names."""

import pytest
import torch

import regard
from regard.core import Mixer, Place, Pointwise, part
from regard.schema import find, names
from regard.verify import laws

VARIANTS = [(name, index) for name in names(Mixer) for index in range(len(find(Mixer, name).examples))]


def make(name: str, index: int) -> Mixer:
    torch.manual_seed(index)
    spec = {"part": name, **find(Mixer, name).examples[index]}
    return part(Mixer, spec, width=24, heads=3, depth=2, place=Place(encoder=1, decoder=2, memory=24))


@pytest.mark.parametrize(("name", "index"), VARIANTS)
def test_laws(name, index):
    for finding in laws.check(make(name, index)):
        assert finding.holds, f"{finding.law}: {finding.worst:.2e} > {finding.limit:.0e} ({finding.detail})"


@pytest.mark.parametrize(("name", "index"), VARIANTS)
def test_one_position(name, index):
    """A sequence of one position works."""
    subject = laws.Subject(make(name, index))
    x, memory = subject.inputs(2, 1), subject.memory(2)
    y = subject.forward(x, None, memory)
    assert y.shape == (2, 1, subject.module.out_width)
    assert bool(torch.isfinite(y).all())


@pytest.mark.parametrize(("name", "index"), VARIANTS)
def test_long_steps_in_two_layers(name, index):
    """Layers share cached facts about a step, so one layer alone proves little."""
    if not make(name, index).streams or issubclass(find(Mixer, name), Pointwise):
        return
    torch.manual_seed(index)
    spec = {"part": name, **find(Mixer, name).examples[index]}
    attention = {"mixer": {"part": "attention", "pattern": "everything"}}

    def model(wiring: str) -> regard.core.Model:
        decoder = {"depth": 2, "layer": [{"mixer": spec, "wiring": wiring}]}
        table = {"kind": "encoder-decoder", "width": 24, "heads": 3, "encoder": {"layer": [attention]}}
        table["embed"] = {"part": "tokens", "position": "sinusoidal"}  # no two keys of the memory are alike
        return regard.build({"vocab": 61, "model": table | {"decoder": decoder}})

    try:
        subject = laws.Subject(model("pre"))
    except regard.UserError:  # what changes the width is added to nothing
        subject = laws.Subject(model("plain"))
    for law, time in ((laws.long, 150), (laws.branches, 130)) if index == 0 else ((laws.long, 150),):
        torch.manual_seed(index)
        found = law(subject, time)
        assert found.holds, f"{found.law}: {found.worst:.2e} ({found.detail})"
