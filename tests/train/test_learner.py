"""One step: accumulation, smoothing, precision, extra losses, and a state from which the same steps follow."""

import pytest
import torch

from regard.data import IGNORE, Batch, ResumableBatches
from regard.parts.objectives.next_token import NextToken
from regard.runs.settings import Settings
from regard.train.learner import Learner


class Given:
    """Batches as they are, epoch after epoch."""

    def __init__(self, *batches):
        self.batches = batches

    def epoch(self, number):
        return list(range(len(self.batches)))

    def make(self, number):
        return self.batches[number]


def batch(*rows):
    width = max(len(row) for row in rows)
    targets = torch.tensor([[*row, *[IGNORE] * (width - len(row))] for row in rows])
    valid = targets != IGNORE
    tokens = torch.cat((torch.ones(len(rows), 1, dtype=torch.long), targets[:, :-1].clamp(min=0)), 1)
    return Batch(tokens, targets, valid, count=int(valid.sum()))


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_accumulation_is_one_large_batch(model):
    """Of batches with different numbers of tokens."""
    small, large = [[3, 4, 5]], [[6, 7, 8, 9, 10], [4, 5]]
    taken = []
    for accumulate, batches in ((1, [batch(*small, *large)]), (2, [batch(*small), batch(*large)])):
        settings = Settings(gradient_accumulation=accumulate, max_grad_norm=0, label_smoothing=0.1)
        learner = Learner(model(dropout=0.0).double(), NextToken(0.1), ResumableBatches(Given(*batches)), settings)
        assert learner.advance(lambda: 0.01)
        taken.append((gradients(learner.model), learner.loss, learner.tokens))
    (one, loss, tokens), (other, same_loss, same_tokens) = taken
    assert tokens == same_tokens == 10
    assert loss == pytest.approx(same_loss, rel=1e-12)
    for name in one:
        torch.testing.assert_close(one[name], other[name])


def test_speed_counts_the_tokens_that_are_read(model):
    """Source and target of a pair, the text of a classifier; no padding, no label."""
    pair = batch([3, 4, 5], [6, 7])
    source_valid = torch.tensor([[True, True, True, True], [True, False, False, False]])
    source = torch.full((2, 4), 5)
    assert pair.input_tokens == 5
    assert pair._replace(source=source, source_valid=source_valid).input_tokens == 5 + 5
    assert pair._replace(valid=None, source=source).input_tokens == 6 + 8
    labelled = Batch(pair.tokens, torch.tensor([0, 1]), pair.valid, count=2)
    assert labelled.input_tokens == 5
    pictures = Batch(torch.zeros(2, 3, 8, 8), torch.tensor([0, 1]), count=2)
    assert pictures.input_tokens == 2
    asked_once = pair._replace(targets=torch.full_like(pair.targets, IGNORE).index_fill(1, torch.tensor(0), 4), count=2)
    learner = Learner(model(), NextToken(), ResumableBatches(Given(asked_once)), Settings(gradient_accumulation=2))
    assert learner.advance(lambda: 0.01)
    assert learner.tokens == 4
    assert [count for _, count in learner.recent] == [10]


def test_parts_are_one_batch(model, monkeypatch):
    """On a CPU a batch goes through the model in parts; the gradient is that of all."""
    rows, found = ([3, 4, 5], [6], [7, 8, 9, 10], [11, 12]), []
    for most in (1, 5, 1000):
        monkeypatch.setattr("regard.train.learner.MICRO_BATCH_WORK", 0)
        monkeypatch.setattr("regard.train.learner.MIN_MICRO_BATCH", most)
        settings = Settings(max_grad_norm=0.0, lr=1.0, schedule="constant", warmup=0, optimizer="adam")
        learner = Learner(model(dropout=0.0).double(), NextToken(0.1), ResumableBatches(Given(batch(*rows))), settings)
        learn, seen = learner._backward, []
        learner._backward = lambda part, count, learn=learn, seen=seen: (
            seen.append(len(part.tokens)) or learn(part, count)
        )
        assert learner.advance(lambda: 0.0)
        assert sum(seen) == 4
        found.append((len(seen), learner.loss, gradients(learner.model)))
    assert [many for many, _, _ in found] == [4, 3, 1]
    for _, loss, grads in found[:2]:
        assert loss == pytest.approx(found[2][1], rel=1e-9)
        for name, grad in found[2][2].items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-9, atol=1e-12)


def test_loss_per_token(model):
    learner = Learner(
        model(dropout=0.0),
        NextToken(0.3),
        ResumableBatches(Given(batch([3, 4, 5], [6]))),
        Settings(label_smoothing=0.3),
    )
    one = batch([3, 4, 5], [6])
    p = model(dropout=0.0)(one.tokens, one.valid).log_softmax(-1)
    wanted = -sum(float(p[r, t, one.targets[r, t]].detach()) for r, t in ((0, 0), (0, 1), (0, 2), (1, 0))) / 4
    learner.advance(lambda: 0.01)
    assert learner.loss == pytest.approx(wanted, rel=1e-5), "what is told is -log p, without smoothing"


@pytest.mark.parametrize("head", ["vocabulary", {"part": "vocabulary", "softcap": 3.0, "bias": True}])
def test_smoothing(model, head):
    """(1 - s) of the right token and s of all tokens alike, by hand; where scores are no product, too."""
    one, b, s = model(dropout=0.0, head=head).double(), batch([3, 4, 5], [6]), 0.2
    found = NextToken(s)(one, b)
    logp = one(b.tokens, b.valid).log_softmax(-1)
    wanted = nll = 0.0
    for r, t in ((0, 0), (0, 1), (0, 2), (1, 0)):
        right = -float(logp[r, t, b.targets[r, t]].detach())
        wanted += (1 - s) * right + s * -float(logp[r, t].mean().detach())
        nll += right
    assert float(found.loss.detach()) == pytest.approx(wanted)
    assert float(found.nll) == pytest.approx(nll)
    assert found.count == 4


def test_extra_losses_are_weighed_by_tokens(model):
    """What a part asks to be added counts once per step, however many batches that has."""
    experts = {"part": "experts", "experts": 3, "expert": {"part": "mlp", "hidden": 4}, "balance": 1.0}
    layer = [{"mixer": {"part": "attention", "pattern": "causal"}, "feedforward": experts}]
    rows = batch([3, 4, 5], [6, 7, 8])
    taken = []
    for batches in ((rows,), (rows, rows)):
        learner = Learner(
            model(dropout=0.0, layer=layer),
            NextToken(),
            ResumableBatches(Given(*batches)),
            Settings(gradient_accumulation=len(batches), max_grad_norm=0),
        )
        learner.advance(lambda: 0.0)
        taken.append(gradients(learner.model))
    router = next(name for name in taken[0] if "router" in name)
    assert float(taken[0][router].norm()) > 0
    for name in taken[0]:
        torch.testing.assert_close(*(grads[name] for grads in taken))
    without = Learner(model(dropout=0.0, layer=[layer[0] | {"feedforward": experts | {"balance": 0.0}}]), NextToken(),
                      ResumableBatches(Given(rows)), Settings(max_grad_norm=0))  # fmt: skip
    without.advance(lambda: 0.0)
    assert not torch.equal(gradients(without.model)[router], taken[0][router])


def test_bfloat16(model):
    """Layers in bfloat16, weights and log p in float32; about the same as without."""
    seen = []
    losses = []
    for precision in ("float32", "bfloat16"):
        one = model(dropout=0.0)
        one.stack.layers[0].branches["feedforward"].into.register_forward_hook(lambda m, x, y: seen.append(y.dtype))
        learner = Learner(
            one, NextToken(0.1), ResumableBatches(Given(batch([3, 4, 5], [6]))), Settings(precision=precision)
        )
        for _ in range(3):
            assert learner.advance(lambda: 0.01)
        losses.append(learner.loss)
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in one.parameters())
    assert set(seen[:3]) == {torch.float32}
    assert set(seen[3:]) == {torch.bfloat16}
    assert losses[0] == pytest.approx(losses[1], abs=0.05)
    assert losses[0] != losses[1]


def test_the_same_steps_follow(model, feed):
    """From the state and the model, in another learner, whatever that had done: dropout, average and data included."""
    settings = Settings(ema=0.9, gradient_accumulation=2, optimizer="muon")
    one = Learner(model(0), NextToken(), feed(), settings)
    for _ in range(7):
        one.advance(lambda: 0.01)
    with one.ema.swapped_in():
        tensors, numbers = one.state()
        tensors = {name: t.clone() for name, t in tensors.items()}
        weights = {name: t.clone() for name, t in one.model.state_dict().items()}
    for _ in range(9):
        one.advance(lambda: 0.01)
    other = Learner(model(1), NextToken(), feed(), settings)
    for _ in range(3):
        other.advance(lambda: 0.5)
    other.model.load_state_dict(weights)
    other.restore(tensors, numbers)
    other.seek(numbers["epoch"], numbers["taken"])
    for _ in range(9):
        other.advance(lambda: 0.01)
    assert (one.step, one.tokens, one.loss, one.place) == (other.step, other.tokens, other.loss, other.place)
    for mine, yours in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, yours)
    for mine, yours in zip(one.ema.values, other.ema.values, strict=True):
        assert torch.equal(mine, yours)


def test_the_place_is_after_what_was_learned(model, feed):
    """Not after what was taken ahead."""
    learner, plain = Learner(model(), NextToken(), feed(), Settings()), feed()
    for _ in range(plain.size + 3):
        learner.advance(lambda: 0.01)
        next(plain)
        assert (learner.place.epoch, learner.place.taken) == (plain.epoch, plain.index)
        assert learner.epoch == plain.epoch + plain.index / plain.size


@pytest.mark.parametrize("checkpointing", [True, False])
def test_checkpointing_is_passed_on(model, feed, checkpointing):
    learner = Learner(model(), NextToken(), feed(), Settings(gradient_checkpointing=checkpointing))
    assert learner.model.stack.gradient_checkpointing is checkpointing


def test_nothing_changes_when_the_loss_is_not_finite(model):
    def objective(model, batch):
        found = NextToken()(model, batch)
        return found._replace(loss=found.loss * float("nan")) if bool((batch.targets == 9).any()) else found

    batches = Given(batch([3, 4]), batch([9, 4]), batch([5, 4]))
    learner = Learner(model(), objective, ResumableBatches(batches), Settings(ema=0.5))
    assert learner.advance(lambda: 0.01)
    before = [p.detach().clone() for p in learner.model.parameters()]
    assert not learner.advance(lambda: 0.01)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))
    assert learner.step == 1
    assert learner.advance(lambda: 0.01)
    assert learner.all_finite()
    with torch.no_grad():
        learner.model.embed.table[3, 2] = float("inf")
    assert not learner.all_finite()
