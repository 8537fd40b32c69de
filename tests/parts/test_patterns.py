"""The meaning of single patterns."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from regard.core import Context, Mixer, Pattern, UserError, part
from regard.parts.patterns.heads import Heads
from regard.parts.patterns.matrix import Matrix
from regard.parts.patterns.padding import Padding
from regard.parts.patterns.prefix import Prefix
from regard.parts.patterns.random_blocks import RandomBlocks
from regard.parts.patterns.segment import Segment
from regard.parts.patterns.window import Window

parse = Pattern.parse


def picture(text: str, length: int) -> list[str]:
    """One string per query, of the first head."""
    return ["".join("#" if seen else "." for seen in row) for row in parse(text).mask(length)[0].tolist()]


def test_pictures():
    assert picture("causal & window(2)", 4) == ["#...", "##..", ".##.", "..##"]
    assert picture("window(2, 0)", 4) == picture("causal & window(2)", 4)
    assert picture("window(1, 2)", 4) == ["###.", ".###", "..##", "...#"]
    assert picture("dilated(2, 2)", 5) == ["#.#..", ".#.#.", "#.#.#", ".#.#.", "..#.#"]
    assert picture("dilated(2, 3, 0)", 5) == ["#....", ".#...", "..#..", "#..#.", ".#..#"]
    assert picture("stride(3)", 5) == ["#..#.", ".#..#", "..#..", "#..#.", ".#..#"]
    assert picture("block(2)", 5) == ["##...", "##...", "..##.", "..##.", "....#"]
    assert picture("first(2)", 3) == ["##.", "##.", "##."]
    assert picture("last(2, 4)", 5) == ["..##."] * 5
    assert picture("causal | prefix(2)", 4) == ["##..", "##..", "###.", "####"]
    assert picture("global_tokens(1, at=(3,))", 5) == ["#####", "#..#.", "#..#.", "#####", "#..#."]
    assert picture("causal & fixed(3)", 7) == [
        "#......",
        "##.....",
        "###....",
        "..##...",
        "..###..",
        "..####.",
        "..#..##",
    ]


@pytest.mark.parametrize(
    ("context", "block", "verts", "size"), [(8, 2, 2, 1), (12, 2, 3, 2), (6, 1, 1, 2), (8, 4, 2, 1)]
)
def test_fixed_as_in_the_paper(context, block, verts, size):
    """Built from blocks, as the original does: in a window of blocks, groups of `size` block columns from its end."""
    length, stride = 48, context // block
    allowed = np.zeros((verts, length, length), dtype=bool)
    for head in range(verts):
        columns = [stride - 1 - size * head - i for i in range(size)]
        for query in range(length):
            for key in range(query + 1):
                same = query // context == key // context
                allowed[head, query, key] = same or (key // block) % stride in columns
    ours = parse(f"causal & fixed({context}, {size * block}, {verts})").mask(length)
    assert np.array_equal(ours.numpy(), allowed)


def test_heads_go_round():
    pattern = parse("heads(window(2), stride(3), first(1)) & fixed(4, 1, 2)")
    assert pattern.heads == 6
    mask = pattern.mask(11)
    for head in range(6):
        one = parse(["window(2)", "stride(3)", "first(1)"][head % 3]).mask(11)[0]
        assert torch.equal(mask[head], one & parse("fixed(4, 1, 2)").mask(11)[head % 2])
    nested = Heads((parse("heads(causal, window(2))"), parse("stride(3)"), parse("first(1)")))
    assert nested.heads == 6
    assert torch.equal(nested.mask(9)[3], parse("window(2)").mask(9)[0])  # number 0, which at head 3 is its second


STREAMING = [[0], [0, 1], [0, 1], [0, 1], [2, 4], [3, 4], [4, 6], [4, 6], [1, 5]]
WHOLE = [
    *([3, 5, 6], [2, 4, 7], [0, 3, 5], [5, 6, 8], [1, 2, 7]),
    *([0, 2, 8], [1, 3, 5], [0, 1, 8], [3, 5, 6], [1, 2, 4]),
]


def test_random_blocks():
    """The random blocks must never change: models are trained with them."""

    def links(pattern: Pattern, blocks: int, size: int) -> list[list[int]]:
        mask = pattern.mask(blocks * size)[0].unflatten(0, (blocks, size)).unflatten(2, (blocks, size))
        assert torch.equal(mask.any(3).any(1), mask.all(3).all(1)), "blocks are seen whole"
        return [row.nonzero().flatten().tolist() for row in mask.any(3).any(1)]

    streaming = links(RandomBlocks(2, block=3), 9, 3)
    assert streaming == STREAMING
    for index, row in enumerate(streaming):
        assert len(row) == min(2, index + 1)
        assert max(row) <= index
    whole = links(RandomBlocks(3, block=4, seed=1, of=40), 10, 4)
    assert whole == WHOLE
    assert all(len(row) == 3 for row in whole)
    assert links(RandomBlocks(3, block=4, seed=2, of=40), 10, 4) != whole
    assert links(RandomBlocks(99, block=2, of=8), 4, 2) == [[0, 1, 2, 3]] * 4


def test_random_blocks_are_spread():
    """Each block is about as likely as any other, and another seed gives other links."""
    mask = RandomBlocks(8, block=1, of=64).mask(64, 64)[0]
    many = torch.stack([RandomBlocks(8, block=1, seed=seed, of=64).mask(64)[0] for seed in range(32)]).float()
    assert not torch.equal(many[0], many[1])
    assert torch.equal(many[0].bool(), mask)
    each = many.mean((0, 1))  # expected 1/8, of 2048 draws: a deviation of 0.0073
    assert float((each - 1 / 8).abs().max()) < 5 * 0.0073
    pair = many.mean(0)  # 32 draws: a deviation of 0.058
    assert float((pair - 1 / 8).abs().max()) < 7 * 0.058


def test_a_growing_sequence_keeps_its_links():
    long, short = RandomBlocks(2, 4).mask(100)[0], RandomBlocks(2, 4).mask(60)[0]
    assert torch.equal(long[:60, :60], short)


def test_matrix_from_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    allowed = torch.eye(5, dtype=torch.bool)
    allowed[3, 1] = True
    np.save("a.npy", allowed.numpy())
    np.save("ints.npy", allowed.numpy().astype(np.int8))
    save_file({"adjacency": allowed.to(torch.uint8)}, "a.safetensors")
    for text in ("matrix('a.npy')", "matrix('ints.npy')", "matrix('a.safetensors')"):
        pattern = parse(text)
        assert str(pattern) == text
        assert pattern == parse(text)
        assert hash(pattern) == hash(parse(text))
        assert torch.equal(pattern.mask(5)[0], allowed)
        assert pattern.causal
        assert pattern.fixed
    one = parse("matrix('a.npy')")
    np.save("a.npy", ~allowed.numpy())
    assert one != parse("matrix('a.npy')"), "the same file with another content is another pattern"


def test_matrix_files_that_are_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.npy").write_text("hello")
    (tmp_path / "text.safetensors").write_text("hello")
    (tmp_path / "empty.npy").write_text("")
    np.save("twos.npy", np.full((3, 3), 2))
    np.save("flat.npy", np.ones(3))
    np.save("nothing.npy", np.ones((0, 3)))
    np.save("words.npy", np.array([["a"]]))
    np.save("objects.npy", np.array([[{}]]), allow_pickle=True)
    np.savez("zip.npz", a=np.ones((2, 2)))
    (tmp_path / "zip.npz").rename("zip.npy")
    (tmp_path / "folder.npy").mkdir()
    save_file({"a": torch.ones(2, 2), "b": torch.ones(2, 2)}, "two.safetensors")
    found = sorted(path.name for path in tmp_path.iterdir())
    assert len(found) == 11
    for name in [*found, "a\0.npy", ""]:
        with pytest.raises(UserError):
            Matrix(name)


def test_matrix():
    allowed = torch.ones(4, 6, dtype=torch.bool).tril(1)
    pattern = Matrix(allowed)
    assert not pattern.causal
    assert Matrix(allowed.tril()).causal
    allowed[:] = False
    assert pattern.mask(4)[0].any(), "a copy was made"
    mask = pattern.mask(8)[0]
    assert torch.equal(mask[:4, :6], torch.ones(4, 6, dtype=torch.bool).tril(1))
    assert not mask[4:].any()
    assert not mask[:, 6:].any()
    graphs = Matrix(torch.stack((torch.eye(3), torch.ones(3, 3))))
    assert (graphs.rows, graphs.fixed, graphs.causal, str(graphs)) == (2, False, False, "matrix(<2 x 3 x 3>)")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Segment(torch.zeros(3)),
        lambda: Segment(torch.zeros(2, 3)),
        lambda: Segment(torch.zeros(2, 0, dtype=torch.long)),
        lambda: Segment([[1, 2]]),
        lambda: Padding(torch.ones(2, 2, dtype=torch.long)),
        lambda: Padding(torch.ones(2)),
        lambda: Padding(3),
        lambda: Prefix(torch.ones(2)),
        lambda: Prefix(torch.tensor(3)),
        lambda: Prefix(-1),
        lambda: Matrix(torch.full((2, 2), 0.5)),
        lambda: Matrix(torch.ones(2, dtype=torch.bool)),
        lambda: Window("3"),
        lambda: Heads(()),
        lambda: Heads("causal"),
    ],
)
def test_wrong_data(make):
    with pytest.raises(UserError):
        make()


def test_data_is_told_apart_by_identity():
    ids = torch.zeros(2, 5, dtype=torch.long)
    assert Segment(ids) == Segment(ids)
    assert hash(Segment(ids)) == hash(Segment(ids))
    assert Segment(ids) != Segment(ids.clone())
    assert Prefix(3) == Prefix(3) != Prefix(4)
    assert Prefix(torch.tensor([3])) != Prefix(3)


def test_beyond_the_data_nobody_is_seen():
    mask = Segment(torch.zeros(1, 3, dtype=torch.long)).mask(5)[0]
    assert mask[:3, :3].all()
    assert int(mask.sum()) == 9


def test_rows_of_a_batch():
    at = torch.arange(6)
    q, k = at[None, None, :, None], at[None, None, None, :]
    ids = torch.tensor([[0, 0, 0, 1, 1, 2], [4, 5, 4, 5, 4, 5]])
    assert torch.equal(Segment(ids).allows(q, k)[:, 0], ids[:, :, None] == ids[:, None, :])
    lengths = torch.tensor([2, 6])
    assert torch.equal(Padding(lengths).allows(q, k)[:, 0, 3], at[None] < lengths[:, None])
    assert torch.equal(Prefix(lengths).allows(q, k)[:, 0, 3], at[None] < lengths[:, None])


@pytest.mark.parametrize("own", ["causal", "causal & window(4)", "everything"])
def test_packed_documents_are_as_alone(own):
    """Two documents in one row, kept apart by their ids, give what each gives alone."""
    torch.manual_seed(0)
    mixer = part(Mixer, {"part": "attention", "pattern": own, "position": "rotary"}, width=24, heads=3).double()
    one, two = torch.randn(1, 5, 24).double(), torch.randn(1, 8, 24).double()
    ids = torch.tensor([[0] * 5 + [1] * 8])
    packed = mixer(torch.cat((one, two), 1), Context.begin(1, 13, pattern=Segment(ids)))
    alone = torch.cat([mixer(x, Context.begin(1, x.shape[1])) for x in (one, two)], 1)
    assert torch.allclose(packed, alone, atol=1e-12)
