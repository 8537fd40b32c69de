"""The picture of an alignment."""

import pytest

from regard.core import UserError
from regard.look.alignment import figure, png

SOURCE, TARGET = ["c", "a", "t", "</s>"], ["K", "AE", "T"]
WEIGHTS = [[0.9, 0.1, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.2, 0.7, 0.1]]


def test_labels_and_numbers_stand_where_they_should():
    axes = figure(WEIGHTS, SOURCE, TARGET, "cat").axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == SOURCE
    assert [label.get_text() for label in axes.get_yticklabels()] == TARGET
    assert axes.images[0].get_array().tolist() == WEIGHTS
    assert axes.get_title() == "cat"


def test_png(tmp_path):
    png(WEIGHTS, SOURCE, TARGET, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_sizes_must_agree():
    with pytest.raises(UserError, match="3 by 3"):
        figure(WEIGHTS, SOURCE[:3], TARGET)


def test_signs_that_are_no_letters(tmp_path):
    """Dollar signs are literal, spaces are visible, and missing glyphs raise no error."""
    source, target = ["$x_{", " ", "\n", "$"], ["你好", " the ", r"\frac$"]
    png(WEIGHTS, source, target, tmp_path / "a.png", "a $ title _ of \\ signs$")
    axes = figure(WEIGHTS, source, target).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == [r"\$x_{", "␣", "↵", r"\$"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["你好", "the", r"\frac\$"]


def test_long_texts_are_drawn_small():
    drawn = figure([[1 / 400] * 400] * 130, ["token"] * 400, ["said"] * 130)
    axes = drawn.axes[0]
    assert 40 < len(axes.get_xticklabels()) <= 60
    assert 40 < len(axes.get_yticklabels()) <= 60
    assert max(drawn.get_size_inches()) < 25


def test_one_token():
    assert figure([[1.0]], ["</s>"], ["</s>"]).axes[0].images[0].get_array().tolist() == [[1.0]]


def test_places_that_cannot_be_written_to(tmp_path):
    with pytest.raises(UserError, match="no folder"):
        png(WEIGHTS, SOURCE, TARGET, tmp_path / "nowhere" / "a.png")
    (tmp_path / "a.png").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        png(WEIGHTS, SOURCE, TARGET, tmp_path / "a.png")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
