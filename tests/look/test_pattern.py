"""Pictures of patterns, as text and as PNG."""

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from regard.core import Pattern, UserError
from regard.look.pattern import figure, png, text

WINDOW = """\
causal & window(3)
0 █▄···
2 ▀██▄·
4 ··▀▀▀
rows are queries, columns are keys; two queries per line: █ both allowed, ▀ the upper, ▄ the lower
5 positions, a query attends to 2.4 keys on average, causal, with a cache of 3 keys"""

PLAIN = """\
window(2)
 0 ##.........
 1 ###........
 2 .###.......
 3 ..###......
 4 ...###.....
 5 ....###....
 6 .....###...
 7 ......###..
 8 .......###.
 9 ........###
10 .........##
rows are queries, columns are keys; # allowed, . masked
11 positions, a query attends to 2.818 keys on average, not causal"""

HEADS = """\
causal & heads(window(1), first(1), window(1))
head 0, 2 of every 3
0 ▀▄··
2 ··▀▄
head 1 of every 3
0 █···
2 █···"""

LONG = """\
causal
  0 ▓░····························································
  6 ██▓░··························································
 12 ████▓░························································"""


def test_text():
    assert text("causal & window(3)", 5) == WINDOW
    assert text(Pattern.parse("window(2)"), 11, ascii=True) == PLAIN


def test_heads_that_look_alike_are_drawn_once():
    assert text("causal & heads(window(1), first(1), window(1))", 4).startswith(HEADS)
    assert "head 0" not in text("causal & heads(window(3), window(3))", 9)


def test_long_sequences_are_shrunk():
    lines = text("causal", 186).splitlines()
    assert "\n".join(lines[:4]) == LONG
    assert len(lines) == 1 + 31 + 2
    assert all(len(line) == 4 + 62 for line in lines[1:-2])
    assert "6 x 3" in lines[-2]
    edge = text("everything", 187, ascii=True).splitlines()
    assert set("".join(line[4:] for line in edge[1:-2])) == {"#"}, "what is beyond the end does not count"
    assert {len(line) for line in edge[1:-2]} == {4 + 63}


def test_every_query_is_in_the_text():
    seen = {"▀": 1, "▄": 1, "█": 2}
    for length in (1, 2, 7, 64):
        lines = text("window(1)", length).splitlines()[1:-2]
        assert sum(seen.get(sign, 0) for line in lines for sign in line) == length


def test_png(tmp_path):
    path = png("causal & (window(4) | first(2))", 32, tmp_path / "picture.png")
    assert [file.name for file in tmp_path.iterdir()] == ["picture.png"]
    image = imread(path)
    assert image.shape[0] > 400
    assert image.shape[1] > 400
    blue = (image[..., 2] - image[..., 0] > 0.3).mean()
    png("causal & window(1)", 32, path)  # over the old one
    assert 0.005 < (imread(path)[..., 2] - imread(path)[..., 0] > 0.3).mean() < blue / 3


def test_what_is_drawn():
    pattern = Pattern.parse("heads(causal & window(3), stride(4), causal & window(3))")
    drawn = figure(pattern, 13)
    assert drawn.get_suptitle().replace("\n", " ") == str(pattern)
    images = [np.asarray(axes.images[0].get_array()) for axes in drawn.axes]
    assert len(images) == 2
    for image, head in zip(images, (0, 1), strict=True):
        assert np.array_equal(image, pattern.mask(13)[head].numpy())
    assert [axes.get_title() for axes in drawn.axes] == ["head 0, 2 of every 3", "head 1 of every 3"]
    assert drawn.axes[0].get_ylabel() == "query"
    assert drawn.axes[0].yaxis_inverted(), "the first query stands at the top"


def test_data_of_a_batch(tmp_path):
    """The first row is shown."""
    from regard.parts.patterns.segment import Segment

    ids = torch.tensor([[0, 0, 1, 1], [0, 1, 2, 3]])
    assert text(Segment(ids), 4, ascii=True).splitlines()[:5] == [
        "segment(<2 x 4>)",
        "0 ##..",
        "1 ##..",
        "2 ..##",
        "3 ..##",
    ]


def test_bad_input(tmp_path):
    with pytest.raises(UserError, match="did you mean 'window'"):
        text("windo(3)")
    for length in (0, -3, 5000):
        with pytest.raises(UserError, match="from 1 to 4096 positions"):
            text("causal", length)
    with pytest.raises(UserError, match="no folder"):
        png("causal", 8, tmp_path / "nowhere" / "a.png")
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        png("causal", 8, tmp_path / "taken.png")
    assert [file.name for file in tmp_path.iterdir()] == ["taken.png"]
