"""Untrained models that have something to say, what they are asked, and when two answers are the same."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from regard.core import Model
from regard.decode import Hypothesis, Request, beam, greedy, sample
from regard.decode.result import Stepper
from tests.models import shallow

VOCAB, END, START = 17, 3, 2
SOURCES, PROMPTS = (5, 9, 1, 7), (3, 1, 6, 4)  # lengths
MOST = (12, 7, 12, 10)

Decoder = Callable[..., list[list[Hypothesis]]]

WAYS: dict[str, Decoder] = {
    "greedy": lambda model, request, rows: [[one] for one in greedy(model, request)],
    "sampling": lambda model, request, rows: [
        [one] for one in sample(model, request, 1.3, top_k=9, repetition_penalty=2.0, seeds=[[5, row] for row in rows])
    ],
    "beam": lambda model, request, rows: beam(model, request, size=4, num_return=3, length_penalty=0.7),
    "patient beam": lambda model, request, rows: beam(model, request, size=3, num_return=2, early_stopping="never"),
}


@functools.cache
def make(name: str) -> Model:
    """In double, and with such weights that the best token is far ahead of the next."""
    torch.manual_seed(4)
    model = shallow(name, VOCAB, ["model.tie=none"]).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.5)
    return model


class Lively:
    """An untrained model likes to repeat itself and never ends: this one also has an opinion about what follows what,
    says no token twice in a row, and likes to end."""

    follows = 3 * torch.randn(VOCAB, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    follows -= 20 * torch.eye(VOCAB)
    follows[:, END] += 2.0
    vocab = VOCAB

    def __init__(self, inner: Stepper):
        self.inner = inner

    def start(self, batch, capacity, *, memory=None):
        return self.inner.start(batch, capacity, memory=memory)

    def step(self, tokens, state, valid=None):
        scores, state = self.inner.step(tokens, state, valid)
        return 4 * F.layer_norm(scores, (VOCAB,)) + self.follows[tokens], state


class LivelyAhead(Lively):
    """The same, asked as regard's models are: for the scores of a few rows at a time, and of the last column alone."""

    def last_hidden(self, tokens, state, valid=None):
        x, state = self.inner.last_hidden(tokens, state, valid)
        last = valid.sum(1) - 1 if valid is not None else torch.full((len(tokens),), tokens.shape[1] - 1)
        return torch.cat((tokens[range(len(tokens)), last][:, None].to(x), x), 1), state

    def logits(self, x):
        scores = self.inner.logits(x[:, 1:])
        return 4 * F.layer_norm(scores, (VOCAB,)) + self.follows[x[:, 0].long()]


def ragged(lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(4, VOCAB, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(5))
    return tokens, torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]


def ask(model: Model, rows: tuple[int, ...] = (0, 1, 2, 3)) -> Request:
    """Ragged sources, or ragged prompts: the chosen rows of one and the same batch, no wider than they need."""
    most = torch.tensor([MOST[row] for row in rows])
    lengths = [(SOURCES if model.kind == "encoder-decoder" else PROMPTS)[row] for row in rows]
    tokens, valid = ragged(SOURCES if model.kind == "encoder-decoder" else PROMPTS)
    if model.source_embed is not None:
        torch.manual_seed(5)
        tokens = model.source_embed.random_input(*tokens.shape)  # not every source is made of tokens
    tokens, valid = tokens[list(rows), : max(lengths)], valid[list(rows), : max(lengths)]
    if model.kind == "encoder-decoder":
        with torch.no_grad():
            return Request.after(START, END, model.encode(tokens, valid), most)
    return Request(tokens, END, most, valid)


def same(one: list[list[Hypothesis]], two: list[list[Hypothesis]]) -> None:
    for left, right in zip(one, two, strict=True):
        assert [a.tokens for a in left] == [a.tokens for a in right]
        assert [a.ended for a in left] == [a.ended for a in right]
        for a, b in zip(left, right, strict=True):
            assert a.score == pytest.approx(b.score, rel=1e-5)
            assert a.logprob == pytest.approx(b.logprob, rel=1e-5)
