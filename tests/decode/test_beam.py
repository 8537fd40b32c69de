"""Beam search against the list of all sentences, and its corners."""

import pytest
import torch

import regard
from regard.core import Dropout, Memory, UserError
from regard.decode import Hypothesis, Request, beam, greedy
from regard.decode.beam import EARLY_STOPPING
from regard.decode.session import Session
from regard.ops.dispatch import disabled

from .toy import END, Toy, ask, count

WIDE = 64  # beginnings: more than any step of these languages has
PROMPTS = [[1], [2, 1, 3], [3, 3]]


def full(answer: Hypothesis) -> list[int]:
    return answer.tokens + [END] * answer.ended


def check(found: list[list[Hypothesis]], wanted: list[list[tuple[float, list[int]]]], best: int) -> None:
    for answers, ranking in zip(found, wanted, strict=True):
        assert [full(answer) for answer in answers] == [said for _, said in ranking[:best]]
        assert [answer.score for answer in answers] == pytest.approx([score for score, _ in ranking[:best]])


def test_the_list_of_sentences_is_complete():
    said = [tuple(sentence) for sentence in Toy(4).sentences(3)]
    assert len(said) == len(set(said)) == count(4, 3) == 1 + 3 + 9 + 27


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0, -0.5, -2.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_wide_beam_finds_the_best_of_all(penalty, seed):
    toy = Toy(4, seed)
    found = beam(toy, ask(PROMPTS, 3), WIDE, penalty, num_return=9, early_stopping="never")
    check(found, [toy.ranked(prompt, 3, penalty) for prompt in PROMPTS], 9)


def plain(toy: Toy, prompt: list[int], most: int, size: int, penalty: float, best: int, stop: str):
    """Beam search as one would tell it: a sentence at a time, in lists. Scores and sentences, best first."""
    live, done = [(0.0, [])], []
    for length in range(1, most + 1):
        options = []
        for total, said in live:
            scores, _ = toy.step(torch.tensor([prompt + said]), toy.start(1, 0))
            logs = scores[0, -1].log_softmax(-1).tolist()
            options += [(total + log, [*said, token]) for token, log in enumerate(logs)]
        options.sort(key=lambda option: -option[0])
        done += [(total / length**penalty, said) for total, said in options[:size] if said[-1] == END]
        live = [option for option in options if option[1][-1] != END][:size]
        done.sort(key=lambda pair: -pair[0])
        kindest = max((live[0][0] / n**penalty for n in range(length + 1, most + 1)), default=0.0) if live else 0.0
        likely = sorted((score * len(said) ** penalty for score, said in done), reverse=True)[:best]
        over = {
            "full": len(done) >= size,
            "heuristic": len(done) >= best and likely[-1] >= (live[0][0] if live else 0.0),
            "never": len(done) >= best and done[best - 1][0] >= kindest,
        }
        if not live or over[stop]:
            return done[:best]
    return sorted(done + [(total / most**penalty, said) for total, said in live], key=lambda pair: -pair[0])[:best]


@pytest.mark.parametrize("stop", EARLY_STOPPING)
@pytest.mark.parametrize(
    ("size", "best", "penalty"), [(1, 1, 1.0), (2, 1, -2.0), (3, 2, 0.5), (4, 4, 1.5), (9, 2, 0.0)]
)
def test_a_narrow_beam_does_what_it_says(size, best, penalty, stop):
    for seed in range(8):
        toy = Toy(6, seed, ends=1.0)
        limits = [7, 3, 5]
        found = beam(toy, ask(PROMPTS, limits), size, penalty, best, stop)
        told = zip(PROMPTS, limits, strict=True)
        check(found, [plain(toy, prompt, most, size, penalty, best, stop) for prompt, most in told], best)


def test_with_sources():
    toy = Toy(4, 5)
    memory = Memory(torch.randn(3, 1, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    found = beam(toy, ask([[1]] * 3, [4, 1, 3], memory), 3**4, num_return=7, early_stopping="never")
    rows = [Memory(memory.x[row : row + 1]) for row in range(3)]
    rankings = [toy.ranked([1], most, 1.0, row) for most, row in zip((4, 1, 3), rows, strict=True)]
    for answers, ranking in zip(found, rankings, strict=True):
        check([answers], [ranking], min(7, len(ranking)))
    assert len({tuple(map(tuple, map(full, answers))) for answers in found}) == 3


def test_every_row_has_its_own_room():
    toy = Toy(4, 3)
    limits = [1, 4, 2]
    found = beam(toy, ask(PROMPTS, limits), 3**4, num_return=4, early_stopping="never")
    check(found, [toy.ranked(prompt, most, 1.0) for prompt, most in zip(PROMPTS, limits, strict=True)], 4)


@pytest.mark.parametrize("stop", EARLY_STOPPING)
def test_several_answers_are_distinct_and_sorted(stop):
    for answers in beam(Toy(7, 1, ends=1.0), ask(PROMPTS, 9), 6, num_return=6, early_stopping=stop):
        assert len({tuple(full(answer)) for answer in answers}) == len(answers) == 6
        scores = [answer.score for answer in answers]
        assert scores == sorted(scores, reverse=True)
        assert all(a.score == pytest.approx(a.logprob / len(full(a))) for a in answers)


def test_the_penalty_favours_length():
    toy = Toy(5, 6, ends=1.0)
    lengths = [
        sum(len(full(answers[0])) for answers in beam(toy, ask(PROMPTS, 6), 256, p, early_stopping="never"))
        for p in (0, 1, 3)
    ]
    assert lengths[0] < lengths[1] < lengths[2]


def test_stopping_early_is_no_better_and_no_longer():
    worse = 0
    for seed in range(12):
        toys = Toy(6, seed, ends=1.0), Toy(6, seed, ends=1.0)
        early, late = (
            beam(toy, ask(PROMPTS, 12), 3, 1.5, early_stopping=stop)
            for toy, stop in zip(toys, ("full", "never"), strict=True)
        )
        assert sum(toys[0].asked) <= sum(toys[1].asked)
        for one, two in zip(early, late, strict=True):
            assert one[0].score <= two[0].score + 1e-12
            worse += one[0].score < two[0].score - 1e-12
    assert worse  # else the two are the same


def test_late_stopping_keeps_answers_that_come_after_the_first_few():
    """The end is likely at once, but with a high penalty a long sentence is better."""
    toy = Toy(3, 4, ends=2.0)
    best = toy.ranked([1], 6, 3.0)[0]
    found = beam(toy, ask([[1]], 6), 2, 3.0, early_stopping="never")[0][0]
    assert len(full(found)) > 2
    assert found.score == pytest.approx(best[0])


def test_a_beam_larger_than_the_language():
    toy = Toy(2, 0)
    found = beam(toy, ask([[1], [1, 1]], 2), 50, num_return=50)
    assert [sorted(map(full, answers)) for answers in found] == [sorted(toy.sentences(2))] * 2


def test_the_end_at_once():
    for answer in beam(Toy(5, 0, ends=99.0), ask(PROMPTS, 8), 3):
        assert answer[0].tokens == []
        assert answer[0].ended
        assert answer[0].logprob == pytest.approx(0.0)


def test_nothing_but_the_end():
    toy = Toy(1)
    assert [len(answers) for answers in beam(toy, ask([[0, 0], [0, 0]], 8), 3, num_return=2)] == [1, 1]
    assert toy.asked == [2]  # nothing is left to search


def test_no_end_at_all():
    for answers in beam(Toy(5, 0, ends=-99.0), ask(PROMPTS, [3, 1, 5]), 3, num_return=3):
        assert len(answers) == 3
        assert not any(answer.ended for answer in answers)
    assert len(answers[0].tokens) == 5


def test_a_beam_of_one_is_greedy():
    toy = Toy(9, 3)
    assert [a[0].tokens for a in beam(toy, ask(PROMPTS, 8), 1)] == [a.tokens for a in greedy(toy, ask(PROMPTS, 8))]


def test_finished_sentences_leave_the_batch():
    toy = Toy(6, 2, ends=1.0)
    beam(toy, ask([[1], [2], [3], [4], [5]], [2, 2, 9, 9, 9]), 4)
    assert toy.asked[:2] == [5, 20]  # a beginning each, then four
    assert toy.asked[2] <= 12
    assert toy.asked == [toy.asked[0], *sorted(toy.asked[1:], reverse=True)]
    assert len(toy.asked) <= 9


def test_no_more_room_is_asked_for_than_there_is():
    """Prompts of 3 and 1 with 2 and 5 more: the last token is never read, so there are 5 places."""
    toy = Toy(4, ends=-99.0)
    beam(toy, ask([[1, 2, 3], [1]], [2, 5]), 2)
    assert toy.capacity == 5
    assert len(toy.asked) == 5


@pytest.mark.parametrize(("size", "best"), [(0, 1), (2, 3), (2, 0)])
def test_what_makes_no_sense_is_refused(size, best):
    with pytest.raises(UserError, match="1 <= num_return <= size"):
        beam(Toy(4), ask(PROMPTS, 3), size, num_return=best)


def test_requests_that_make_no_sense_are_refused():
    with pytest.raises(UserError, match="room for at least one new token"):
        beam(Toy(4), ask(PROMPTS, [3, 0, 2]), 2)
    with pytest.raises(UserError, match="nothing to continue"):
        beam(Toy(4), ask([[1], []], 3), 2)
    broken = Toy(4)
    broken.out[0] = torch.nan
    with pytest.raises(UserError, match="logits are NaN"):
        beam(broken, ask(PROMPTS, 3), 2)


def hook_model(model):
    model.register_forward_hook(lambda *given: None)


def hook_head(model):
    model.head.register_forward_hook(lambda module, given, logits: logits.flip(-1))


def replace_logits(model):
    real = model.logits
    model.logits = lambda x: real(x).flip(-1)


@pytest.mark.parametrize("edit", [hook_model, hook_head, replace_logits])
def test_hooks_count_in_a_search_of_many_rows(edit):
    """There the best tokens are found by a kernel, from hidden vectors."""
    torch.manual_seed(2)
    model = regard.build("gpt2", size="tiny", vocab=61).eval().double()
    request = Request(torch.randint(61, (8, 3)), 3, torch.full((8,), 6))
    plain = beam(model, request, 4)
    edit(model)
    found = beam(model, request, 4)
    with disabled():
        wanted = beam(model, request, 4)
    assert [[one.tokens for one in row] for row in found] == [[one.tokens for one in row] for row in wanted]
    assert (found[0][0].tokens == plain[0][0].tokens) == (edit is hook_model)


def test_dropout_modules_in_training_mode_drop_in_steps():
    """Even if the stack around them is in eval mode."""
    torch.manual_seed(2)
    model = regard.build("gpt2", size="tiny", vocab=61, overrides=["model.dropout=0.5"]).eval()
    session, tokens = Session(model), torch.randint(61, (3, 1))
    for module in model.modules():
        if isinstance(module, Dropout):
            module.train()
    with torch.no_grad():
        one, two = (session.step(tokens, session.start(3, 4))[0] for _ in range(2))
    assert not torch.equal(one, two)
