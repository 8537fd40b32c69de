"""Paths through a graph against their enumeration."""

from itertools import combinations, pairwise

import pytest
import torch

from regard.ops import dag

N, VOCAB, M = 6, 5, 4


def make(seed=0, rows=3):
    torch.manual_seed(seed)
    vertices, targets = torch.tensor([6, 5, 4])[:rows], torch.tensor([4, 2, 4])[:rows]
    log_probs = torch.randn(rows, N, VOCAB, dtype=torch.float64).log_softmax(-1)
    real = torch.arange(N) < vertices[:, None]
    allowed = torch.ones(N, N, dtype=torch.bool).triu(1) & real[:, None] & real[:, :, None]
    links = torch.randn(rows, N, N, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
    links = links.log_softmax(-1).nan_to_num(-torch.inf, neginf=-torch.inf)
    y = torch.randint(VOCAB, (rows, M))
    return log_probs, links, y, targets, vertices


def paths(vertices, length):
    """All paths of so many vertices from the first to the last."""
    for inner in combinations(range(1, vertices - 1), length - 2) if length > 1 else ():
        yield (0, *inner, vertices - 1)


def log_of(path, tokens, log_probs, links):
    return sum(log_probs[v, t] for v, t in zip(path, tokens, strict=True)) + sum(links[a, b] for a, b in pairwise(path))


def test_likelihood_sums_over_all_paths():
    log_probs, links, y, targets, vertices = make()
    log_probs.requires_grad_()
    match = log_probs.gather(2, y[:, None].expand(-1, N, -1)).mT
    found = dag.log_likelihood(match, links, targets, vertices)
    wanted = []
    for row in range(3):
        tokens = y[row, : targets[row]].tolist()
        every = [log_of(path, tokens, log_probs[row], links[row]) for path in paths(int(vertices[row]), len(tokens))]
        wanted.append(torch.stack(every).logsumexp(0))
    torch.testing.assert_close(found, torch.stack(wanted))
    one, two = (torch.autograd.grad(x.sum(), log_probs, retain_graph=True)[0] for x in (found, torch.stack(wanted)))
    torch.testing.assert_close(one, two)


def test_probabilities_of_all_targets_sum_to_those_of_all_paths():
    """Over every target of every length, the mass is that of the paths that reach the last vertex: all of it."""
    log_probs, links, *_ = make()
    total = 0.0
    for length in range(2, N + 1):
        for number in range(VOCAB**length if length < 4 else 0):
            y = torch.tensor([[number // VOCAB**i % VOCAB for i in range(length)]])
            match = log_probs[:1].gather(2, y[:, None].expand(-1, N, -1)).mT
            total += float(dag.log_likelihood(match, links[:1], torch.tensor([length]), torch.tensor([N])).exp())
    mass = sum(
        float(sum(links[0, a, b] for a, b in pairwise(path)).exp()) for length in (2, 3) for path in paths(N, length)
    )
    assert total == pytest.approx(mass)


def test_no_path_is_minus_infinity():
    log_probs, links, y, _, _ = make()
    match = log_probs.gather(2, y[:, None].expand(-1, N, -1)).mT
    found = dag.log_likelihood(match, links, torch.tensor([4, 4, 4]), torch.tensor([3, 3, 3]))
    assert bool((found == -torch.inf).all())


def test_best_alignment_is_the_best_of_all():
    log_probs, links, y, targets, vertices = make(1)
    match = log_probs.gather(2, y[:, None].expand(-1, N, -1)).mT
    found = dag.best_alignment(match, links, targets, vertices)
    for row in range(3):
        tokens = y[row, : targets[row]].tolist()
        logs = {
            path: log_of(path, tokens, log_probs[row], links[row]) for path in paths(int(vertices[row]), len(tokens))
        }
        best = max(logs, key=logs.__getitem__)
        assert found[row].tolist() == [*best, *[-1] * (M - len(tokens))]


@pytest.mark.parametrize("seed", range(4))
def test_viterbi_is_the_best_of_all_paths(seed):
    log_probs, links, _, _, vertices = make(seed)
    tokens, route, score = dag.viterbi(log_probs, links, vertices, 0.5)
    said = log_probs.argmax(-1)
    for row in range(3):
        best, winner = -float("inf"), None
        for length in range(2, int(vertices[row]) + 1):
            for path in paths(int(vertices[row]), length):
                log = float(log_of(path, said[row, list(path)].tolist(), log_probs[row], links[row]))
                if log / length**0.5 > best:
                    best, winner, total = log / length**0.5, path, log
        real = route[row] >= 0
        assert tuple(route[row][real].tolist()) == winner
        assert tokens[row][real].tolist() == said[row, list(winner)].tolist()
        assert float(score[row]) == pytest.approx(total)


def test_a_walk_ends_even_if_links_are_not_numbers():
    log_probs, links, _, _, vertices = make(2)
    _, route, _ = dag.greedy(log_probs, torch.full_like(links, torch.nan), vertices)
    assert route.max(1).values.tolist() == (vertices - 1).tolist()


@pytest.mark.parametrize("lookahead", [False, True])
def test_greedy_follows_the_best_links(lookahead):
    log_probs, links, _, _, vertices = make(2)
    tokens, route, score = dag.greedy(log_probs, links, vertices, lookahead)
    for row in range(3):
        at, path, best = 0, [0], log_probs[row].max(-1)
        total = float(best.values[0])
        while at != int(vertices[row]) - 1:
            ways = [float(links[row, at, v]) + lookahead * float(best.values[v]) for v in range(N)]
            after = max(range(int(vertices[row])), key=ways.__getitem__)
            total += float(links[row, at, after]) + float(best.values[after])
            at = after
            path.append(at)
        real = route[row] >= 0
        assert route[row][real].tolist() == path
        assert tokens[row][real].tolist() == best.indices[path].tolist()
        assert float(score[row]) == pytest.approx(total)
