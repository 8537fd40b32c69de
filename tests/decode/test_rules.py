"""What may be said next: the rules by themselves, beside those of `transformers`, and in every strategy."""

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

import regard
from regard.decode import Request, beam, greedy, sample
from regard.decode.rules import compose, suppress, suppress_at_begin, timestamps

END, PLAIN, VOCAB = 11, 14, 31
ZERO = PLAIN + 1


def histories(count: int, length: int) -> torch.Tensor:
    """Words, and times that never go back, some of them twice."""
    draw = torch.Generator().manual_seed(length)
    rows = []
    for _ in range(count):
        row, now = [], ZERO
        for _ in range(length):
            if torch.rand((), generator=draw) < 0.5:
                now = min(now + int(torch.randint(3, (), generator=draw)), VOCAB - 3)
                row.append(now)
            else:
                row.append(int(torch.randint(END, (), generator=draw)))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.long).view(count, length)


@pytest.mark.parametrize("length", range(6))
@pytest.mark.parametrize("latest", [None, 4])
def test_times_as_transformers(length, latest):
    config = GenerationConfig(eos_token_id=END, bos_token_id=END)
    config.no_timestamps_token_id, config.max_initial_timestamp_index = PLAIN, latest
    theirs = WhisperTimeStampLogitsProcessor(config, begin_index=2)
    ours = compose([suppress([PLAIN]), timestamps(ZERO, END, latest)])
    said = histories(40, length)
    before = torch.full((40, 2), 12)
    seen = set()
    for seed in range(3):
        scores = 2 * torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(seed))
        kept = scores.clone()
        want, found = theirs(torch.cat((before, said), 1), scores), ours(scores, said)
        assert torch.equal(found, want)
        assert torch.equal(scores, kept), "a rule must not change what it is given"
        seen |= {tuple(row) for row in want.isinf().tolist()}
    assert len(seen) >= {0: 1, 1: 3}.get(length, 6)


def test_what_is_never_said():
    scores = torch.randn(3, VOCAB)
    none, one = torch.zeros(3, 0, dtype=torch.long), torch.zeros(3, 1, dtype=torch.long)
    assert suppress([4, 6, 999])(scores, one).isinf().nonzero()[:, 1].tolist() == [4, 6] * 3
    assert suppress_at_begin([4])(scores, none)[:, 4].isinf().all()
    assert torch.equal(suppress_at_begin([4])(scores, one), scores)
    assert compose([]) is None


def no_twice(scores: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
    """A rule that needs to know all that a row has said: no token twice."""
    return scores.scatter(1, said, -torch.inf)


WAYS = {
    "greedy": lambda model, request: [[one] for one in greedy(model, request)],
    "sampling": lambda model, request: [[one] for one in sample(model, request, 1.5, seeds=[5] * len(request.prefix))],
    "beam": lambda model, request: beam(model, request, size=3, num_return=2),
}


@pytest.mark.parametrize("config", WAYS)
def test_every_strategy_keeps_a_rule(config):
    """Rows that end at different times do not mix up what each has said, and what is likely is counted by what the rule
    leaves."""
    torch.manual_seed(3)
    model = regard.build("transformer-decoder", size="tiny", vocab=13, overrides=["model.depth=1"]).double().eval()
    prefix = torch.tensor([[2, 7], [2, 9], [2, 4], [2, 4]])
    most = torch.tensor([9, 3, 12, 6])
    plain = WAYS[config](model, Request(prefix, 3, most))
    found = WAYS[config](model, Request(prefix, 3, most, logits_processor=no_twice))
    assert any(len(set(one.tokens)) < len(one.tokens) for answers in plain for one in answers)
    for row, answers in enumerate(found):
        for one in answers:
            assert len(set(one.tokens)) == len(one.tokens)
            said = one.tokens + [3] * one.ended
            with torch.no_grad():
                scores = model(torch.tensor([[*prefix[row].tolist(), *said[:-1]]]))[0, 1:]
            logs = [no_twice(scores[i : i + 1], torch.tensor([said[:i]], dtype=torch.long)) for i in range(len(said))]
            logs = torch.cat(logs).log_softmax(-1)
            assert one.logprob == pytest.approx(float(logs[range(len(said)), said].sum()), rel=1e-5)
    alone = WAYS[config](model, Request(prefix[2:3], 3, most[2:3], logits_processor=no_twice))[0]
    assert [one.tokens for one in alone] == [one.tokens for one in found[2]]
