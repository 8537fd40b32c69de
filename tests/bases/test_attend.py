"""Which kernel is chosen, and a whole attention on each of them."""

import pytest
import torch

from regard.bases import Attend, AttentionMask
from regard.core import Context, Mixer, Pattern, Position, Score, UserError, part, watch


def chosen(kernel: str, pattern: str, length: int, drop: float = 0.0, position: Position | None = None, **see) -> str:
    at = torch.arange(length)[None]
    q = torch.zeros(1, 2, length, 4)
    there = AttentionMask(part(Pattern, pattern), at, at, from_start=True)._replace(**see)
    return Attend(kernel).choose(q, q, there, Score(), position or Position(), drop)


def test_choice():
    assert chosen("auto", "causal & window(64)", 1024) == "blocks"
    assert chosen("auto", "causal & window(64)", 1024, from_start=False) == "sdpa"
    assert chosen("auto", "causal & window(64)", 256) == "sdpa"
    assert chosen("auto", "causal & window(900)", 1024) == "sdpa"
    assert chosen("auto", "causal", 1024) == "sdpa"
    assert chosen("auto", "causal", 1024, drop=0.1) == "blocks"  # where sdpa would write all weights down
    assert chosen("auto", "causal", 1024, position=part(Position, "alibi", heads=2)) == "blocks"
    assert chosen("auto", "everything", 1024, drop=0.1) == "sdpa"
    assert chosen("blocks", "causal", 3) == "blocks"
    assert chosen("blocks", "causal", 3, from_start=False) == "sdpa"
    assert chosen("flex", "causal", 200) == "flex"
    assert chosen("flex", "causal", 200, from_start=False) == "sdpa"
    assert chosen("flex", "causal", 40) == "sdpa"
    assert chosen("sdpa", "causal & window(64)", 1024) == "sdpa"
    assert chosen("reference", "causal", 3, from_start=False) == "reference"
    assert chosen("blocks", "causal", 200, position=part(Position, "shaw", dim=4, heads=2)) == "reference"


def test_bad_arguments():
    with pytest.raises(UserError, match="unknown kernel 'block'"):
        Attend("block")
    with pytest.raises(UserError, match="below 1"):
        Attend(dropout=1.0)


MIXERS = (
    {"pattern": "causal & window(20)", "position": "rotary", "kv_heads": 2},
    {"pattern": "window(7) | global_tokens(2)", "position": "t5"},
    {"pattern": "causal & heads(window(30), stride(16))", "position": "transformer_xl"},
)


@pytest.mark.parametrize("arguments", MIXERS, ids=lambda a: a["pattern"])
def test_whole_mixer(arguments):
    """Ragged rows, longer than a block: the kernel changes nothing, neither in the output nor in any gradient."""
    results = []
    for kernel in ("reference", "blocks", "sdpa"):
        torch.manual_seed(0)
        mixer = part(Mixer, {"part": "attention", "kernel": kernel, **arguments}, width=24, heads=4).double()
        x = torch.randn(3, 257, 24, dtype=torch.float64, requires_grad=True)
        valid = torch.arange(257)[None] < torch.tensor([257, 130, 2])[:, None]
        y = mixer(x, Context.begin(3, 257, valid=valid))[valid]
        y.backward(torch.randn_like(y))
        results.append([y.detach(), x.grad, *(p.grad for p in mixer.parameters())])
    for have in results[1:]:
        for one, two in zip(have, results[0], strict=True):
            assert torch.allclose(one, two, rtol=1e-9, atol=1e-11)


def test_watching_shows_the_weights():
    mixer = part(Mixer, {"part": "attention", "kernel": "blocks", "pattern": "causal & window(3)"}, width=8, heads=2)
    x = torch.randn(1, 9, 8)
    with watch(mixer) as seen, torch.no_grad():
        watched = mixer(x, Context.begin(1, 9))
    (weights,) = seen["attend.weights"]
    assert int((weights[0, 0] > 0).sum()) == 3 * 9 - 3
    assert torch.allclose(watched, mixer(x, Context.begin(1, 9)), atol=1e-6)
