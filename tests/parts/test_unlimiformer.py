"""Unlimiformer: attention to exactly the k nearest keys, and sources of any length in overlapping windows."""

import pytest
import torch

import regard
from regard.core import Context, Memory, Mixer, UserError, part, watch
from regard.parts.mixers import unlimiformer as file
from regard.parts.mixers.attention import Attention
from regard.parts.mixers.unlimiformer import Unlimiformer
from regard.parts.mixers.windows import Windows
from regard.verify.laws import max_difference

LAYER = {"mixer": {"part": "attention", "pattern": "everything"}, "wiring": "post"}


def across(nearest: int, **given) -> Unlimiformer:
    torch.manual_seed(0)
    return Unlimiformer(12, 3, nearest=nearest, **given).double()


def memory(source: int) -> Memory:
    lengths = torch.tensor([source, 4])
    x = torch.randn(2, source, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return Memory(x, torch.arange(source)[None] < lengths[:, None])


@torch.no_grad()
def test_with_enough_neighbours_it_is_attention():
    full = Attention(12, 3, over="memory").double()
    x, context = torch.randn(2, 5, 12, dtype=torch.float64), Context.begin(2, 5, memory=memory(9))
    for nearest, same in ((20, True), (9, True), (8, False)):
        mixer = across(nearest)
        full.load_state_dict(mixer.state_dict())
        gap = (mixer(x, context) - full(x, context)).abs().amax((1, 2))
        assert float(gap[1]) < 1e-12  # four real keys: all are near
        assert (float(gap[0]) < 1e-12) is same


@torch.no_grad()
def test_each_head_of_each_query_has_its_own_neighbours():
    mixer, x, source = across(3), torch.randn(2, 5, 12, dtype=torch.float64), memory(9)
    with watch(mixer) as seen:
        mixer(x, Context.begin(2, 5, memory=source))
    weights = seen["attend.weights"][0]
    q = mixer.q(x).unflatten(-1, (3, 4)).transpose(1, 2)
    k = mixer.k(source.x).unflatten(-1, (3, 4)).transpose(1, 2)
    scores = (q @ k.mT / 2).masked_fill(~source.valid[:, None, None], float("-inf"))
    best = scores.topk(3).indices
    kept = torch.full_like(scores, float("-inf")).scatter(-1, best, scores.gather(-1, best))
    assert max_difference(weights, kept.softmax(-1)) < 1e-12
    assert len({tuple(sorted(row)) for row in best[0].flatten(0, 1).tolist()}) > 1


@pytest.mark.parametrize("position", ["none", "shaw"])
def test_many_queries_in_blocks(monkeypatch, position):
    mixer, found = across(3, position=position, kv_heads=1), []
    for block in (256, 2):
        monkeypatch.setattr(file, "QUERY_BLOCK", block)
        x = torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
        y = mixer(x, Context.begin(2, 5, memory=memory(9)))
        mixer.zero_grad()
        y.square().sum().backward()
        found.append([y.detach(), x.grad, *(p.grad.clone() for p in mixer.parameters())])
    for one, two in zip(*found, strict=True):
        assert max_difference(one, two) < 1e-10


@torch.no_grad()
@pytest.mark.parametrize(("size", "overlap"), [(8, 0.5), (5, 0.4), (6, 0.0), (4, 0.6)])
@pytest.mark.parametrize("time", [1, 7, 8, 9, 26])
def test_windows_one_by_one(size, overlap, time):
    """Cut, read and joined by hand, as the original's loop does."""
    torch.manual_seed(0)
    mixer = Windows(12, [LAYER], size, 2, overlap, 3, position={"part": "learned", "length": size}, norm="layer")
    mixer = mixer.double().eval()
    x = torch.randn(2, time, 12, dtype=torch.float64)
    margin = int(size * overlap / 2)
    stride, begin, done, kept = size - 2 * margin, 0, 0, []
    while done < time:
        last = begin + size >= time
        begin = max(time - size, 0) if last else begin
        some = x[:, begin : begin + size]
        inner = Context.begin(*some.shape[:2])
        y = mixer.stack(mixer.norm(mixer.position.embed(some, inner.positions)), inner)
        end = time if last else begin + size - margin
        kept.append(y[:, done - begin : end - begin])
        begin, done = begin + stride, end
    assert max_difference(mixer(x, Context.begin(2, time)), torch.cat(kept, 1)) < 1e-12


@torch.no_grad()
def test_a_source_longer_than_the_positions():
    """The encoder of the recipe has 32 positions, and reads 150."""
    model = regard.build("unlimiformer", size="tiny", vocab=11).eval()
    assert model.source_limit is None
    source = torch.randint(11, (1, 150))
    assert model.encode(source).x.shape == (1, 150, 128)
    changed = torch.cat((source[:, :100], torch.randint(11, (1, 50))), 1)
    near, far = (model.encode(changed).x - model.encode(source).x).abs().amax(2)[0].split((64, 86))
    assert float(near.max()) < 1e-5  # those windows are the same
    assert float(far.max()) > 1e-3


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"part": "unlimiformer", "nearest": 0}, "nearest must be at least 1"),
        ({"part": "unlimiformer", "nearest": 3, "score": "additive"}, "choose a score that is one"),
        ({"part": "windows", "size": 0, "layer": [LAYER]}, "windows need a size from 1 on"),
        ({"part": "windows", "size": 8, "overlap": 1.0, "layer": [LAYER]}, "an overlap from 0 to below 1"),
        ({"part": "windows", "size": 8, "position": "rotary", "layer": [LAYER]}, "acts in attention"),
        (
            {"part": "windows", "size": 8, "position": {"part": "learned", "length": 7}, "layer": [LAYER]},
            "position 'learned' has 7 positions, not 8",
        ),
    ],
)
def test_bad_arguments(spec, sentence):
    with pytest.raises(UserError, match=sentence):
        part(Mixer, spec, width=12, heads=3)
