"""Hashed n-grams: which tokens a position depends on, what hashing keeps apart, and what is refused."""

import pytest
import torch

import regard
from regard.core import Context, Embed, UserError, part


def embed(n: int = 2, buckets: int = 4096, vocab: int = 61) -> Embed:
    torch.manual_seed(0)
    return part(Embed, {"part": "ngrams", "n": n, "buckets": buckets}, width=16, vocab=vocab).double()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_position_depends_on_the_last_n_tokens(n):
    one, tokens = embed(n), torch.arange(11)[None]
    before = one(tokens, Context.begin(1, 11))[0]
    changed = tokens.clone()
    changed[0, 4] = 50
    differs = (one(changed, Context.begin(1, 11))[0] != before).any(-1)
    assert differs.nonzero().flatten().tolist() == list(range(4, 4 + n))


def test_word_order_counts():
    one = embed()
    there, back = one(torch.tensor([[5, 9], [9, 5]]), Context.begin(2, 2)).sum(1)
    assert not torch.allclose(there, back)
    bag = embed(n=1)
    there, back = bag(torch.tensor([[5, 9], [9, 5]]), Context.begin(2, 2)).sum(1)
    assert torch.allclose(there, back)


def test_most_pairs_have_a_bucket_of_their_own():
    """As many buckets as pairs: by chance, 1 - 1/e of them are taken."""
    one = embed(vocab=64)
    first, second = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
    pairs = torch.stack((first, second), -1).view(-1, 2)
    assert len(one.codes(one.cut(pairs), 2)[:, 1].unique()) > 0.6 * 4096


def test_cut_tokens_give_the_same():
    one, tokens = embed(3), torch.randint(61, (4, 9))
    whole = one(tokens, Context.begin(4, 9))
    windows = one.cut(tokens)
    assert torch.equal(one(windows, Context.begin(4, 9)), whole)
    later = one(windows[:, 5:], Context.after(torch.full((4,), 5), 4))
    assert torch.equal(later, whole[:, 5:])


def test_plain_tokens_of_a_later_step_are_refused():
    """N-grams need the tokens before a step, which are not available."""
    with pytest.raises(UserError, match="whole text at once"):
        embed()(torch.randint(61, (2, 3)), Context.after(torch.tensor([4, 7]), 3))


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ("model.embed.n=0", "n must be at least 1"),
        ("model.embed.buckets=0", "buckets must be at least 1"),
    ],
)
def test_sizes_are_checked(sets, words):
    with pytest.raises(UserError, match=words):
        regard.build("fasttext", size="tiny", vocab=61, overrides=[sets])


def test_tokens_out_of_range_are_named():
    with pytest.raises(UserError, match="tokens range from 3 to 61, but the table has rows 0 to 60"):
        embed()(torch.tensor([[3, 61]]), Context.begin(1, 2))


def test_it_learns_from_the_command_line(tmp_path, capsys):
    """Only the order of two words tells the labels apart, so that words alone would not do."""
    from regard.cli import main

    data = tmp_path / "pairs.tsv"
    lines = [f"{a} {b} and\tab\n{b} {a} and\tba\n" for a in "abcdefgh" for b in "ijklmnop"]
    data.write_text("".join(lines) * 2)
    run = tmp_path / "run"
    asked = [
        "--tokenizer",
        "words",
        "--dev",
        str(data),
        "--epochs",
        "20",
        "--set",
        "train.batch_tokens=64",
        "--out",
        str(run),
    ]
    assert main(["train", "fasttext", "--size", "tiny", "--data", str(data), "--threads", "1", *asked]) == 0
    assert regard.load(run).predict(["a i and", "i a and"])[0][0].text == "ab"
    assert "accuracy 100" in capsys.readouterr().out
