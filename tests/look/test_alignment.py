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
