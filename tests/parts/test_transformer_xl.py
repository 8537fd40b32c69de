"""Transformer-XL's segments: how far a token reaches, and what the state keeps."""

import pytest
import torch

import regard
from regard.core import Model, Pattern, UserError, state_bytes

SEGMENT, BEFORE = 4, 3


def make(depth: int) -> Model:
    torch.manual_seed(0)
    pattern = f"causal & block({SEGMENT}, before={BEFORE})"
    changes = [f"model.depth={depth}", f"model.layer.0.mixer.pattern={pattern}", "model.width=24", "model.heads=3"]
    return regard.build("transformer-xl", size="tiny", vocab=31, overrides=changes).double().eval()


@pytest.mark.parametrize("depth", [1, 2, 3])
@torch.no_grad()
def test_every_layer_reaches_one_segment_further(depth):
    """The last token of the first segment is seen as many segments later as there are layers, and no further."""
    model, tokens = make(depth), torch.randint(31, (1, 6 * SEGMENT))
    other = tokens.clone()
    other[:, SEGMENT - 1] = (tokens[:, SEGMENT - 1] + 1) % 31
    changed = (model(tokens) - model(other)).abs().sum(-1)[0] > 1e-9
    last = max(changed.nonzero().flatten().tolist())
    assert not changed[: SEGMENT - 1].any()
    assert last // SEGMENT == depth


def test_a_position_of_the_segment_before_is_seen_or_not():
    mask = Pattern.parse(f"causal & block({SEGMENT}, before={BEFORE})").mask(12)[0]
    assert mask[4].nonzero().flatten().tolist() == [1, 2, 3, 4]
    assert mask[7].nonzero().flatten().tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert mask[8].nonzero().flatten().tolist() == [5, 6, 7, 8]
    assert torch.equal(Pattern.parse("block(4)").mask(9), Pattern.parse("block(4, before=0)").mask(9))


@torch.no_grad()
def test_what_is_kept_stays():
    model = make(2)
    held = [state_bytes(model.start(1, capacity).layers) for capacity in (200, 2000, 20_000)]
    assert len(set(held)) == 1
    assert model.cost(1, 19_999).state == held[0]
    assert model.cost(1, 19_999).flops == model.cost(1, 1999).flops
    assert model.cost(16_384).flops < 1.01 * 4 * model.cost(4096).flops, "linear in the length"


def test_bad_memory():
    with pytest.raises(UserError, match=r"block\.before must be at least 0"):
        Pattern.parse("block(4, before=-1)")
