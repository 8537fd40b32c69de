"""Decoders that write all tokens at once: their strategies by definition. Their law is regard/verify/canvases.py."""

import pytest
import torch

import regard
from regard.core import BLANK, Context, Model, UserError, select
from regard.decode import DecodeConfig, canvas
from regard.decode.canvas import Marks, blank_canvases, canvases, strategies_of, strategy_for, write
from regard.files import recipe
from regard.schema import name_of
from regard.verify import laws
from regard.verify.canvases import batches
from tests.models import shallow

VOCAB, MARKS = 23, Marks(0, 1, 2)
NAMES = [name for name in recipe.names() if "length" in recipe.load(name)["model"]]
LENGTHS = (5, 9, 1, 7, 2)


def make(name: str, *overrides: str) -> Model:
    torch.manual_seed(3)
    model = shallow(name, VOCAB, overrides).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)
    return model


def sources(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    source = torch.randint(3, VOCAB, (len(LENGTHS), max(LENGTHS)))
    return source, torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]


def answers(model: Model, source: torch.Tensor, valid: torch.Tensor | None, config: DecodeConfig) -> list:
    with torch.no_grad():
        return write(model, model.encode(source, valid), MARKS, config)


@pytest.mark.parametrize("name", NAMES)
def test_the_law_has_answers_to_compare(name):
    """The law `batches` (regard/verify/canvases.py) runs over every recipe; here its answers are not empty, and a
    canvas whose padding counts is found out."""
    model = make(name)
    source, valid = sources()
    for strategy in strategies_of(model):
        found = answers(model, source, valid, DecodeConfig(strategy=strategy, iterations=4, length_beam=3))
        assert any(one.tokens for row in found for one in row), strategy


def test_the_law_sees_padding_that_counts(monkeypatch):
    def hidden(model, found):
        context = Context.begin(*found.tokens.shape, memory=found.memory)
        return model.hidden(torch.where(found.valid, found.tokens, BLANK), context), context

    monkeypatch.setattr(canvas, "hidden", hidden)
    assert not batches(laws.Subject(make("glat"))).holds
    monkeypatch.undo()
    assert batches(laws.Subject(make("glat"))).holds


def same(found: list, wanted: list) -> None:
    assert [[one.tokens for one in row] for row in found] == [[one.tokens for one in row] for row in wanted]
    for row, other in zip(found, wanted, strict=True):
        assert [one.logprob for one in row] == pytest.approx([one.logprob for one in other], abs=1e-5)


@pytest.mark.parametrize("encoder", ["{part='lstm'}", "{part='attention', pattern='window(3) | first(1)'}"])
def test_other_encoders(encoder):
    model = make("glat", f"model.encoder.layer.0.mixer={encoder}")
    source, valid = sources()
    config = DecodeConfig(length_beam=2)
    together = answers(model, source, valid, config)
    for row, length in enumerate(LENGTHS):
        same(answers(model, source[row : row + 1, :length], None, config), together[row : row + 1])


def test_mask_predict_is_its_definition():
    """As many iterations as tokens: one fewer of the least probable tokens is blank each time."""
    model = make("cmlm")
    source, _ = sources()
    with torch.no_grad():
        memory = model.encode(source[:1])
        memory = select(memory, torch.zeros(1, dtype=torch.long))
        canvas, _ = blank_canvases(model, memory, DecodeConfig())
        canvas = canvas._replace(tokens=torch.full((1, 6), BLANK), valid=torch.ones(1, 6, dtype=torch.bool))
        seen = list(canvases(model, canvas, MARKS, DecodeConfig(strategy="mask_predict", iterations=6)))
        assert len(seen) == 6
        logs = model(canvas.tokens, memory=memory).log_softmax(-1)
        best, tokens = logs.max(-1)
        for step in range(6):
            if step:
                blank = best[0].argsort(stable=True)[: 6 - step]
                given = tokens.clone()
                given[0, blank] = BLANK
                new, said = model(given, memory=memory).log_softmax(-1).max(-1)
                tokens[0, blank], best[0, blank] = said[0, blank], new[0, blank]
            assert torch.equal(seen[step].tokens, tokens)
            assert float(seen[step].logprobs) == pytest.approx(float(best.sum()), abs=1e-5)


def test_editing_stops():
    """With any weights: after so many iterations, or when a canvas comes back."""
    source, valid = sources()
    for seed in range(3):
        torch.manual_seed(seed)
        model = make("levenshtein", "model.head.most=4")
        with torch.no_grad():
            memory = model.encode(source, valid)
            canvas, _ = blank_canvases(model, memory, DecodeConfig())
            seen = list(canvases(model, canvas, MARKS, DecodeConfig(iterations=30)))
        assert 1 <= len(seen) <= 30
        assert all(int(one.lengths.max()) <= 2 * max(LENGTHS) + 20 + 1 for one in seen)


def test_what_is_refused():
    with pytest.raises(UserError, match="writes all tokens at once, so it does not step"):
        make("nat").start(1, 5, source=torch.ones(1, 3, dtype=torch.long))
    table = recipe.load("nat", "tiny")
    del table["model"]["length"]
    with pytest.raises(UserError, match=r"writes all tokens at once also needs to know how many: model\.length"):
        regard.build(table, vocab=VOCAB)
    with pytest.raises(UserError, match="needs the head 'crf'"):
        strategy_for(make("nat"), DecodeConfig(strategy="viterbi"))
    with pytest.raises(UserError, match=r"decode\.iterations must be at least 1"):
        DecodeConfig(iterations=0)
    with pytest.raises(UserError, match="did you mean 'mask_predict'"):
        DecodeConfig(strategy="mask_predcit")
    assert name_of(regard.build("nat-crf", "tiny", 11).head) == "crf"


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("da-transformer", "head.heads", 3), ("nat-fertility", "length.classes", 1), ("nat", "length.weight", 1e300),
        ("nat-crf", "head.candidates", 0), ("levenshtein", "head.most", -1), ("nat-ctc", "length.ratio", 1e300),
        ("nat-ctc", "length.extra", 10**9),
    ],
)  # fmt: skip
def test_impossible_sizes(name, key, value):
    with pytest.raises(UserError, match=key.split(".")[1]):
        make(name, f"model.{key}={value}")


def test_canvases_are_bounded():
    """Whatever a model says: twice the source and 20, unless its canvas is longer by design."""
    model, (source, valid) = make("nat-fertility"), sources()
    with torch.no_grad():
        model.length.out.bias.zero_()[-1] = 1e4  # the largest fertility everywhere
        canvas_, _ = blank_canvases(model, model.encode(source, valid), DecodeConfig())
    assert canvas_.lengths.tolist() == [2 * n + 20 for n in LENGTHS]


def test_nan_is_told():
    for name, break_it in (
        ("nat", lambda model: model.length.table), ("nat-fertility", lambda model: model.length.out.weight),
        ("levenshtein", lambda model: model.head.insert.weight), ("cmlm", lambda model: model.embed.table),
    ):  # fmt: skip
        model = make(name)
        with torch.no_grad():
            break_it(model).fill_(torch.nan)
        with pytest.raises(UserError, match="logits are NaN"):
            answers(model, *sources(), DecodeConfig())


def test_beams_of_alignments_do_not_see_padding():
    model, (source, valid) = make("nat-ctc"), sources()
    config = DecodeConfig(strategy="ctc", beam=3)
    together = answers(model, source, valid, config)
    for row, length in enumerate(LENGTHS):
        same(answers(model, source[row : row + 1, :length], None, config), together[row : row + 1])


def test_a_short_canvas_does_not_end_the_others():
    """A canvas of one position is done after one pass, beside one of six."""
    model, (source, _) = make("cmlm"), sources()
    config = DecodeConfig(strategy="mask_predict", iterations=4)

    def last(rows: list[int], sizes: list[int]) -> list[list[int]]:
        with torch.no_grad():
            memory = model.encode(source[rows])
            real = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
            begun = canvas.Canvas(torch.full(real.shape, BLANK), real, torch.zeros(len(rows)), memory)
            *_, found = canvases(model, begun, MARKS, config)
        return [tokens[:size].tolist() for tokens, size in zip(found.tokens, sizes, strict=True)]

    assert last([0, 1, 2], [1, 6, 6]) == [*last([0], [1]), *last([1], [6]), *last([2], [6])]
