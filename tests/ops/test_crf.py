"""The conditional random field against all sequences of a small vocabulary."""

from itertools import product

import pytest
import torch

from regard.ops import crf

BATCH, N, VOCAB, RANK = 3, 4, 5, 2


def make(dynamic: bool, seed: int = 0):
    torch.manual_seed(seed)
    emissions = torch.randn(BATCH, N, VOCAB, dtype=torch.float64, requires_grad=True)
    left, right = (torch.randn(VOCAB, RANK, dtype=torch.float64, requires_grad=True) for _ in range(2))
    moves = torch.randn(BATCH, N - 1, RANK, RANK, dtype=torch.float64, requires_grad=True) if dynamic else None
    return emissions, left, right, moves


def score_of(y, row, length, emissions, left, right, moves):
    total = sum(emissions[row, i, y[i]] for i in range(length))
    for i in range(1, length):
        middle = torch.eye(RANK, dtype=torch.float64) + (0 if moves is None else moves[row, i - 1])
        total = total + left[y[i - 1]] @ middle @ right[y[i]]
    return total


@pytest.mark.parametrize("dynamic", [False, True])
def test_likelihood_partition_and_viterbi_equal_enumeration(dynamic):
    emissions, left, right, moves = make(dynamic)
    lengths = [4, 2, 1]
    valid = torch.arange(N)[None] < torch.tensor(lengths)[:, None]
    targets = torch.randint(VOCAB, (BATCH, N))
    everything = crf.candidates(emissions, VOCAB)
    among = crf.transitions(left, right, everything, moves)
    found = crf.log_partition(emissions.gather(2, everything), among, valid)
    likelihood = crf.log_likelihood(emissions, left, right, targets, VOCAB, valid, moves)
    path, best = crf.viterbi(emissions.gather(2, everything), among, valid)
    for row, length in enumerate(lengths):
        sequences = product(range(VOCAB), repeat=length)
        every = {y: score_of(y, row, length, emissions, left, right, moves) for y in sequences}
        total = torch.stack(list(every.values())).logsumexp(0)
        torch.testing.assert_close(found[row], total)
        torch.testing.assert_close(likelihood[row], every[tuple(targets[row, :length].tolist())] - total)
        tokens = everything[row].gather(1, path[row, :, None])[:length, 0]
        winner = max(every, key=lambda y: float(every[y].detach()))
        assert tuple(tokens.tolist()) == winner
        torch.testing.assert_close(best[row], every[winner])


def test_gradients_equal_those_of_enumeration():
    emissions, left, right, moves = make(True)
    targets = torch.randint(VOCAB, (BATCH, N))
    leaves = (emissions, left, right, moves)
    found = torch.autograd.grad(crf.log_likelihood(emissions, left, right, targets, VOCAB, dynamic=moves).sum(), leaves)
    total = 0
    for row in range(BATCH):
        every = {y: score_of(y, row, N, *leaves) for y in product(range(VOCAB), repeat=N)}
        total = total + every[tuple(targets[row].tolist())] - torch.stack(list(every.values())).logsumexp(0)
    for one, two in zip(found, torch.autograd.grad(total, leaves), strict=True):
        torch.testing.assert_close(one, two)


def test_few_candidates_hold_the_target_and_the_best():
    emissions, left, right, _ = make(False)
    targets = emissions.argmin(-1)
    tokens = crf.candidates(emissions, 2, targets)
    assert bool((tokens == targets[..., None]).any(-1).all())
    assert bool((tokens == emissions.argmax(-1)[..., None]).any(-1).all())
    likelihood = crf.log_likelihood(emissions, left, right, targets, 2)
    assert bool((likelihood <= 0).all())
    exact = crf.log_likelihood(emissions, left, right, targets, VOCAB)
    assert bool((likelihood > exact).all())
