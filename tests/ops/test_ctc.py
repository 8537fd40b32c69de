"""CTC against all canvases of a small vocabulary."""

from itertools import product

import pytest
import torch

from regard.ops import ctc

BLANK, VOCAB, N = 2, 4, 5


def joined(canvas):
    """The definition: first repeats are joined, then blanks go."""
    return tuple(t for i, t in enumerate(canvas) if t != BLANK and (i == 0 or canvas[i - 1] != t))


def enumerated(log_probs):
    sums = {}
    for canvas in product(range(VOCAB), repeat=len(log_probs)):
        log = sum(log_probs[i, t] for i, t in enumerate(canvas))
        sums.setdefault(joined(canvas), []).append(log)
    return {y: torch.stack(logs).logsumexp(0) for y, logs in sums.items()}


def test_loss_is_the_sum_over_all_alignments():
    """Also its gradient, of logits that a softmax over the whole vocabulary follows."""
    torch.manual_seed(0)
    logits = torch.randn(3, N, VOCAB, dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(-1)
    targets, lengths = torch.tensor([[0, 0, 1], [3, 1, 0], [1, 1, 1]]), torch.tensor([3, 2, 3])
    canvas = torch.tensor([N, 3, N - 1])
    match = log_probs.gather(2, targets[:, None].expand(-1, N, -1))
    found = ctc.ctc_loss(log_probs[..., BLANK], match, targets, canvas, lengths)
    every = [enumerated(log_probs[row, : canvas[row]]) for row in range(2)]
    wanted = [-all_targets[tuple(targets[row, : lengths[row]].tolist())] for row, all_targets in enumerate(every)]
    torch.testing.assert_close(found[:2], torch.stack(wanted))
    weights = torch.tensor([2.0, 3.0], dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad((weights * one).sum(), logits, retain_graph=True)[0]
        for one in (found[:2], torch.stack(wanted))
    )
    torch.testing.assert_close(ours[:2], theirs[:2])
    assert found[2] == torch.inf  # three equal tokens need two blanks between them
    assert ctc.needed(targets, torch.arange(3) < lengths[:, None]).tolist() == [4, 2, 5]
    assert ctc.needed(targets).tolist() == [4, 3, 5]


def test_collapse_follows_its_definition():
    canvases = torch.tensor(list(product(range(VOCAB), repeat=4)))
    tokens, counts = ctc.collapse(canvases, BLANK)
    assert [tuple(row[:n]) for row, n in zip(tokens.tolist(), counts.tolist(), strict=True)] == [
        joined(canvas) for canvas in canvases.tolist()
    ]
    valid = torch.arange(4)[None].expand(len(canvases), 4) < 3
    tokens, counts = ctc.collapse(canvases, BLANK, valid)
    assert [tuple(row[:n]) for row, n in zip(tokens.tolist(), counts.tolist(), strict=True)] == [
        joined(canvas[:3]) for canvas in canvases.tolist()
    ]


@pytest.mark.parametrize("seed", range(5))
def test_a_wide_beam_finds_the_most_probable_target(seed):
    torch.manual_seed(seed)
    log_probs = (2 * torch.randn(N, VOCAB, dtype=torch.float64)).log_softmax(-1)
    every = {y: float(log) for y, log in enumerated(log_probs).items()}
    found = ctc.beam_search(log_probs, BLANK, 1000)
    assert len(found) == len(every)
    for y, log in found:
        assert log == pytest.approx(every[y])
    assert found[0][0] == max(every, key=every.__getitem__)


def test_what_a_scorer_dislikes_is_not_found():
    log_probs = torch.zeros(2, VOCAB).log_softmax(-1)
    found = ctc.beam_search(log_probs, BLANK, 50, lambda prefix: -100.0 if 0 in prefix else 0.0)
    assert 0 not in found[0][0]
