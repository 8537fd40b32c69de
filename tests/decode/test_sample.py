"""Sampling against plain definitions on a small vector."""

import math

import pytest
import torch

import regard
from regard.core import UserError
from regard.decode import Request, greedy, sample, stream
from regard.decode.sample import candidate_weights, draw_tokens, penalize_repetition

from .toy import END, Toy, ask

SCORES = [2.0, -1.0, 0.5, 3.0, 0.4, -2.5, 1.0]
PROMPTS = [[1], [2, 1, 3], [3, 3]]


def share(**sampling: float) -> list[float]:
    """The chance of each token, as the code has it."""
    weights, tokens = candidate_weights(
        torch.tensor([SCORES], dtype=torch.float64), **({"temperature": 1.0} | sampling)
    )
    dense = torch.zeros(1, len(SCORES), dtype=torch.float64)
    dense = weights if tokens is None else dense.scatter(1, tokens, weights)
    return (dense / dense.sum()).tolist()[0]


def softmax(scores: list[float]) -> list[float]:
    total = sum(math.exp(s) for s in scores)
    return [math.exp(s) / total for s in scores]


def only(kept: set[int], chances: list[float]) -> list[float]:
    left = [p if i in kept else 0.0 for i, p in enumerate(chances)]
    return [p / sum(left) for p in left]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature(temperature):
    assert share(temperature=temperature) == pytest.approx(softmax([s / temperature for s in SCORES]))


def test_a_temperature_near_nothing_is_greedy():
    assert share(temperature=1e-30) == pytest.approx([0, 0, 0, 1, 0, 0, 0])


@pytest.mark.parametrize("k", [1, 3, 7, 99])
def test_top_k(k):
    kept = set(sorted(range(7), key=lambda i: -SCORES[i])[:k])
    assert share(top_k=k) == pytest.approx(only(kept, softmax(SCORES)))


def nucleus(chances: list[float], p: float) -> set[int]:
    """The fewest likeliest tokens that have p together."""
    kept: set[int] = set()
    for i in sorted(range(len(chances)), key=lambda i: -chances[i]):
        if sum(chances[j] for j in kept) >= p:
            break
        kept.add(i)
    return kept


@pytest.mark.parametrize("p", [1e-9, 0.5, 0.75, 0.9, 0.999999])
def test_top_p(p):
    chances = softmax(SCORES)
    assert share(top_p=p) == pytest.approx(only(nucleus(chances, p), chances))


@pytest.mark.parametrize("least", [0.0, 0.05, 0.2, 0.9, 1.0])
def test_min_p(least):
    chances = softmax(SCORES)
    kept = {i for i, p in enumerate(chances) if p >= least * max(chances)}
    assert share(min_p=least) == pytest.approx(only(kept, chances))


def test_all_in_their_order():
    chances = softmax([s / 2 for s in SCORES])
    chances = only(set(sorted(range(7), key=lambda i: -SCORES[i])[:5]), chances)
    chances = only(nucleus(chances, 0.8), chances)
    chances = only({i for i, p in enumerate(chances) if p >= 0.5 * max(chances)}, chances)
    assert share(temperature=2.0, top_k=5, top_p=0.8, min_p=0.5) == pytest.approx(chances)
    assert sum(p > 0 for p in chances) == 2


def test_top_p_is_of_what_top_k_left():
    """The three likeliest have 0.594, 0.219 and 0.080 of all, and so the first two 0.91 of the three."""
    assert share(top_k=3, top_p=0.9) == pytest.approx(only({0, 3}, softmax(SCORES)))


def test_repetition():
    before = torch.tensor([[3, 1, 3], [6, 6, 6]])
    found = penalize_repetition(torch.tensor([SCORES, SCORES], dtype=torch.float64), before, 2.0)
    assert found.tolist() == [[2.0, -2.0, 0.5, 1.5, *SCORES[4:]], [*SCORES[:6], 0.5]]


@pytest.mark.parametrize("top_k", [0, 4])
def test_draws_follow_the_weights(top_k):
    """Evenly spread noise hits each token in proportion."""
    count = 20_000
    noise = (torch.arange(count) + 1) / count
    weights, tokens = candidate_weights(torch.tensor([SCORES]).expand(count, -1), 1.0, top_k)
    drawn = draw_tokens(weights, tokens, noise)
    found = torch.bincount(drawn, minlength=7) / count
    assert found.tolist() == pytest.approx(share(top_k=top_k), abs=2e-4)


def test_draws_at_the_ends_of_the_noise():
    """Neither the least nor the greatest noise leads to a token without weight."""
    weights = torch.tensor([[0.0, 0.3, 0.7, 0.0]])
    for noise, wanted in ((1e-30, 1), (0.3, 1), (0.31, 2), (1.0, 2)):
        assert draw_tokens(weights, None, torch.tensor([noise], dtype=torch.float64)).tolist() == [wanted]


def test_many_draws_follow_the_model():
    toy = Toy(6, 4)
    rows = 4000
    request = ask([[2, 1]] * rows, 1)
    answers = sample(toy, request, seeds=list(range(rows)))
    found = [0] * 6
    for answer in answers:
        found[END if answer.ended else answer.tokens[0]] += 1 / rows
    scores, _ = toy.step(torch.tensor([[2, 1]]), toy.start(1, 3))
    wanted = scores[0, -1].softmax(-1).tolist()
    assert found == pytest.approx(wanted, abs=4 * math.sqrt(0.25 / rows))
    assert len(set(wanted)) == 6


def test_a_seed_gives_the_same_again():
    toy = Toy(9, 1)
    once, again, other = (
        [a.tokens for a in sample(toy, ask(PROMPTS, 12), 2.0, seeds=seeds)]
        for seeds in ([7, 8, [9, 1]], [7, 8, [9, 1]], [17, 8, [9, 2]])
    )
    assert once == again
    assert [a == b for a, b in zip(once, other, strict=True)] == [False, True, False]


def test_without_a_seed_every_time_is_new():
    toy = Toy(9, 1)
    assert len({tuple(sample(toy, ask([[1]], 20), 5.0)[0].tokens) for _ in range(5)}) > 1


def test_temperature_nothing_is_greedy():
    toy = Toy(9, 2)
    plain = greedy(toy, ask(PROMPTS, 10))
    assert plain == sample(toy, ask(PROMPTS, 10), 0.0, seeds=[1, 2, 3])
    assert [a.tokens for a in plain] == [a.tokens for a in sample(toy, ask(PROMPTS, 10), 1.0, top_k=1)]
    for prompt, answer in zip(PROMPTS, plain, strict=True):
        whole = list(prompt)
        for token in answer.tokens:
            scores, _ = toy.step(torch.tensor([whole]), toy.start(1, 0))
            assert token == int(scores[0, -1].argmax())
            whole.append(token)


def test_repetition_counts_the_prompt_and_the_answer():
    """With a penalty beyond all measure nothing is said twice, as long as there is something else with a score above 0;
    here all scores are made so."""
    toy = Toy(9, 2, ends=-99.0)
    toy.bias += 50
    answers = sample(toy, ask(PROMPTS, [5, 4, 6]), 0.0, repetition_penalty=1e9)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert len({*prompt, *answer.tokens}) == len({*prompt}) + len(answer.tokens)
    assert [len(a.tokens) for a in answers] == [5, 4, 6]


def test_a_penalty_does_not_change_how_likely_an_answer_is_said_to_be():
    toy = Toy(9, 2)
    for prompt, answer in zip(PROMPTS, sample(toy, ask(PROMPTS, 7), 0.0, repetition_penalty=3.0), strict=True):
        assert answer.logprob == pytest.approx(toy.logprob(prompt, answer.tokens + [END] * answer.ended), rel=1e-5)


def test_finished_rows_leave_the_batch():
    """Half of nine rows may say two tokens, the others six: when a quarter is done, it goes."""
    toy = Toy(5, ends=-99.0)
    sample(toy, ask([[1]] * 9, [2, 2, 2, 2, 6, 6, 6, 6, 6]), 0.0)
    assert toy.asked == [9, 9, 5, 5, 5, 5]


def test_a_finished_row_never_runs_past_the_positions():
    """A prompt of 6 with 2 more beside five of 1 with 7 more, in a model of 7 positions: one row is too few to be worth
    a copy, but it must not take an eighth position."""
    model = regard.build(
        "transformer-decoder", size="nano", vocab=11, overrides=["model.embed.position.length=7"]
    ).eval()
    prompts = [[1, 2, 3, 4, 5, 6], [1], [2], [3], [4], [5]]
    request = ask(prompts, [2, 7, 7, 7, 7, 7])
    answers = greedy(model, request._replace(end=10))
    assert model.limit == request.capacity == 7
    assert all(
        a.ended or len(a.tokens) == most for a, most in zip(answers, request.max_new_tokens.tolist(), strict=True)
    )
    alone = [greedy(model, ask([p], m)._replace(end=10))[0] for p, m in zip(prompts, [2, 7, 7, 7, 7, 7], strict=True)]
    assert [a.tokens for a in answers] == [a.tokens for a in alone]


def test_a_stream_names_the_rows_that_go_on():
    toy = Toy(6, 3, ends=1.0)
    request = ask([[1], [2], [3], [4]], [1, 5, 3, 5])
    heard: list[list[int]] = [[], [], [], []]
    for new in stream(toy, request, 0.0):
        assert new.rows.shape == new.tokens.shape == new.logprobs.shape
        for row, token in zip(new.rows.tolist(), new.tokens.tolist(), strict=True):
            heard[row].append(token)
    assert heard == [a.tokens + [END] * a.ended for a in greedy(toy, request)]


def test_half_precision_is_widened():
    """Sums of log p are not made of half numbers."""

    class Half(Toy):
        def step(self, tokens, state, valid=None):
            scores, state = super().step(tokens, state, valid)
            return scores.to(torch.bfloat16), state

    new = next(iter(stream(Half(6), ask(PROMPTS, 4), 0.0)))
    assert new.logprobs.dtype == torch.float32


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": -1.0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
    ],
)
def test_what_makes_no_sense_is_refused(sampling):
    with pytest.raises(UserError, match="sampling needs"):
        sample(Toy(4), ask(PROMPTS, 3), **sampling)


def test_a_seed_for_each_row():
    with pytest.raises(UserError, match="one seed for each row: 3, not 2"):
        sample(Toy(4), ask(PROMPTS, 3), seeds=[1, 2])


def test_no_gradient_is_kept():
    model = regard.build("transformer-decoder", size="nano", vocab=11)
    for new in stream(model, Request(torch.tensor([[1]]), END, torch.tensor([3])), 0.0):
        assert not new.logprobs.requires_grad
        assert torch.is_grad_enabled()
