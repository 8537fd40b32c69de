"""The law in decoding, over every recipe that steps: the cache changes nothing, nor do the sentences beside one."""

import functools

import pytest
import torch

from regard.core import Model, UserError, select
from regard.decode import Hypothesis, ModelDraft, NgramDraft, Request, greedy, result, sample, speculate
from regard.decode.sample import SamplingParams
from regard.files import recipe
from tests.models import shallow

from .lively import END, MOST, START, VOCAB, WAYS, Lively, LivelyAhead, ask, make, same
from .uncached import Uncached


def steps(model: Model) -> bool:
    return model.kind != "encoder" and model.stack.streams and not model.head.pools


with torch.device("meta"):  # models are made when a test wants them
    SHAPES = {name: shallow(name) for name in recipe.names() if recipe.load(name)["model"]["kind"] != "towers"}
STEPPING = [name for name, model in SHAPES.items() if steps(model)]


def every(*always: object, few: tuple = ()) -> list[tuple]:
    """With all recipes that step; what differs in the strategy alone, with some of them."""
    return [(one, name) for one in always for name in STEPPING] + [(one, name) for one in few for name in STEPPING[::6]]


@functools.cache
def answers_of(config: str, name: str) -> list[list[Hypothesis]]:
    """Return the answers to all four rows of the batch, which several tests compare with others."""
    model = make(name)
    return WAYS[config](LivelyAhead(model), ask(model), range(4))


SEARCHES = every("greedy", "beam", few=("sampling", "patient beam"))


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    """Scores are made for a few rows at a time, however few there are."""
    monkeypatch.setattr(result, "LOGITS_AT_A_TIME", 5 * VOCAB)


@pytest.mark.parametrize(("config", "name"), SEARCHES)
def test_the_cache_changes_nothing(name, config):
    model = make(name)
    cached = answers_of(config, name)
    same(cached, WAYS[config](Lively(Uncached(model)), ask(model), range(4)))
    assert len({tuple(answers[0].tokens) for answers in cached}) > 1  # else it would prove little


@pytest.mark.parametrize(("config", "name"), SEARCHES)
def test_a_batch_is_its_sentences_one_by_one(name, config):
    model = make(name)
    same(answers_of(config, name), [WAYS[config](Lively(model), ask(model, (row,)), [row])[0] for row in range(4)])


@pytest.mark.parametrize(("config", "name"), SEARCHES)
@torch.no_grad()
def test_an_answer_is_as_likely_as_it_says(name, config):
    """By the model on the whole answer at once."""
    model = make(name)
    request = ask(model)
    for row, answers in enumerate(WAYS[config](Lively(model), request, range(4))):
        begins = request.prefix[row, : int(request.lengths[row])].tolist()
        memory = None if request.memory is None else select(request.memory, torch.tensor([row]))
        for answer in answers:
            said = answer.tokens + [END] * answer.ended
            whole = Lively(Uncached(model))
            scores, _ = whole.step(torch.tensor([begins + said[:-1]]), whole.start(1, 99, memory=memory))
            logs = scores[0, -len(said) :].log_softmax(-1)
            assert answer.logprob == pytest.approx(float(logs[range(len(said)), said].sum()), rel=1e-5)
            assert len(said) <= MOST[row]
            assert answer.ended or len(said) == MOST[row]


@pytest.mark.parametrize(("temperature", "name"), every(0.0, few=(1.3,)))
def test_what_is_heard_is_what_is_answered(name, temperature):
    model, heard = make(name), [[] for _ in range(4)]

    def listen(row: int, token: int) -> None:
        heard[row].append(token)

    answers = sample(Lively(model), ask(model), temperature, seeds=[1, 2, 3, 4], on_token=listen)
    assert heard == [answer.tokens for answer in answers]


class Guesses:
    """What the model would say itself, with a mistake now and then; counts those that it was asked for."""

    def __init__(self, answers: list[list[int]], lengths: list[int]):
        self.answers, self.lengths, self.asked = answers, lengths, 0

    def __call__(self, held, count):
        self.asked += 1
        found = []
        for row in held:
            whole = next(a for a, n in zip(self.answers, self.lengths, strict=True) if row[:n] == a[:n])
            guess = whole[len(row) : len(row) + count]
            found.append([5 if (len(row) + i) % 4 == 3 else token for i, token in enumerate(guess)])
        return found


@pytest.mark.parametrize(("temperature", "name"), every(1.3, few=(0.0,)))
def test_guesses_change_nothing(name, temperature):
    """Good ones, bad ones, and none."""
    model = make(name)
    request = ask(model)._replace(max_new_tokens=torch.tensor([9, 3, 14, 1]))
    if model.kind == "encoder-decoder":  # so that the draft knows which row it is
        request = request._replace(prefix=torch.arange(4, 8)[:, None])
    sampling = SamplingParams(temperature, repetition_penalty=1.1)
    wanted = sample(Lively(model), request, *sampling, seeds=[1, 2, 3, 4])
    lengths = request.lengths.tolist()
    begins = [row[:n] for row, n in zip(request.prefix.tolist(), lengths, strict=True)]
    answers = [b + a.tokens + [END] for b, a in zip(begins, wanted, strict=True)]
    asked = []
    for draft in (Guesses(answers, lengths), NgramDraft(shortest=1), lambda held, count: [[] for _ in held]):
        stepper = Counted(Lively(model))
        found = speculate(stepper, request, draft, 3, sampling, seeds=[1, 2, 3, 4])
        same([[answer] for answer in found], [[answer] for answer in wanted])
        asked.append(stepper.steps)
    assert asked[0] < asked[2] or max(len(answer.tokens) for answer in wanted) < 4
    if model.kind == "decoder":
        found = speculate(Lively(model), request, ModelDraft(Lively(model), 60), 3, sampling, seeds=[1, 2, 3, 4])
        same([[answer] for answer in found], [[answer] for answer in wanted])


class Counted:
    def __init__(self, inner):
        self.inner, self.start, self.steps = inner, inner.start, 0

    def step(self, tokens, state, valid=None):
        self.steps += 1
        return self.inner.step(tokens, state, valid)


@pytest.mark.parametrize("name", [name for name in STEPPING if SHAPES[name].kind == "decoder"])
def test_what_all_begin_with_is_read_once(name, monkeypatch):
    """And the answers are those of prompts that are read one by one."""
    model = make(name)
    request = ask(model)
    begins = torch.randint(4, VOCAB, (1, 9), generator=torch.Generator().manual_seed(7)).expand(4, -1)
    prefix, real = torch.cat((begins, request.prefix), 1), torch.ones_like(begins, dtype=torch.bool)
    longer = request._replace(prefix=prefix, valid=torch.cat((real, request.valid), 1))
    apart = greedy(LivelyAhead(model), longer)
    monkeypatch.setattr(result, "MIN_SHARED_PREFIX", 4)
    assert longer._shared_prefix() == 9
    same([[answer] for answer in greedy(LivelyAhead(model), longer)], [[answer] for answer in apart])


@pytest.mark.parametrize("name", sorted(set(SHAPES) - set(STEPPING)))
def test_a_model_that_does_not_step_is_refused(name):
    with pytest.raises(UserError, match="does not step"):
        greedy(make(name), Request(torch.tensor([[START]]), END, torch.tensor([3])))


def test_what_was_tried_is_enough():
    """Recipes of all kinds, and sentences that end at different times as well as such that run out of room."""
    answers = [row[0] for name in STEPPING for row in answers_of("greedy", name)]
    assert len({len(answer.tokens) for answer in answers}) > 4
    assert sum(len(set(answer.tokens)) > 3 for answer in answers) > len(answers) / 3
    assert {answer.ended for answer in answers} == {True, False}
    assert {SHAPES[name].kind for name in STEPPING} == {"decoder", "encoder-decoder"}
    assert any("seq2seq" in name for name in STEPPING)


def test_a_cache_that_is_wrong_is_seen():
    """The comparison itself: rows of the state mixed up are found out."""
    model = make("transformer")

    class Mixed:
        def start(self, batch, capacity, *, memory=None):
            return model.start(batch, capacity, memory=memory)

        def step(self, tokens, state, valid=None):
            scores, state = model.step(tokens, state, valid)
            return scores, select(state, torch.arange(len(tokens)).roll(1))

    with pytest.raises(AssertionError):
        same(*(WAYS["greedy"](Lively(inner), ask(model), range(4)) for inner in (model, Mixed())))
