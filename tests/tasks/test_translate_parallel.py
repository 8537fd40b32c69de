"""Runs whose decoder writes all tokens at once: which settings count."""

import pytest
import torch

from regard.core import UserError
from regard.data import Tokenizer
from regard.decode import DecodeConfig, canvas
from regard.tasks import translate_parallel
from regard.tasks.translate_parallel import ParallelTranslator
from tests.models import shallow


@pytest.fixture
def run():
    torch.manual_seed(3)
    tokenizer = Tokenizer.train("words", ["one two three four five six"])
    return ParallelTranslator(shallow("cmlm", tokenizer.size, ["model.length.classes=9"]), tokenizer, tokenizer)


def test_a_config_counts_as_it_is(run, monkeypatch):
    """Only its strategy, where it has none, is the recipe's."""
    assert (run.config.strategy, run.config.length_beam) == ("mask_predict", 3)
    seen = []
    monkeypatch.setattr(
        translate_parallel, "write", lambda *given: seen.append(given[3].length_beam) or canvas.write(*given)
    )
    assert len(run.predict(["one two"], DecodeConfig(length_beam=4, num_return=4))[0]) == 4
    run.predict(["one two"], DecodeConfig(length_beam=1))
    run.predict(["one two"])
    assert seen == [4, 1, 3]
    with pytest.raises(UserError, match="--beam is for decoders that write one token after the other"):
        run.predict(["one two"], DecodeConfig(beam=4))


def test_canvases_after_every_pass(run):
    """As many as passes; the last is the answer for the most probable length."""
    config = DecodeConfig(iterations=3, strategy="mask_predict")
    found = list(run.canvases("one two three", config))
    assert len(found) in (1, 2, 3)
    assert run.predict(["one two three"], config)[0][0].text == found[-1].replace("</s>", "").strip()


def test_memory_is_bounded(run):
    """The logits of all positions are held together, so long inputs and several lengths make batches smaller."""
    few, many, wide = (
        run._max_rows(n, DecodeConfig(length_beam=beam), 1) for n, beam in ((99999, 1), (9, 1), (99999, 9))
    )
    assert wide < few < many
    with pytest.raises(UserError, match=r"a canvas of .* positions, 1,000 times"):
        run._max_rows(10**9, DecodeConfig(length_beam=1000), 1)


def test_passes_of_a_single_pass_are_refused_where_they_were_asked_for(run):
    """Not where they are the default, and the recipe says something else: dev sets are decoded so while training."""
    run.model.recipe["decode"] = {"strategy": "parallel", "iterations": 4}
    assert run.predict(["one two"], DecodeConfig())
    assert run.predict(["one two"])
    with pytest.raises(UserError, match="takes one pass: leave out --iterations"):
        run.predict(["one two"], DecodeConfig(iterations=7))
