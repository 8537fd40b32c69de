"""Shortlists: learned from pairs, and answers among their words alone."""

import json

import numpy as np
import pytest
import torch

import regard
from regard.cli import main
from regard.core import UserError
from regard.decode import DecodeConfig, Request, search
from regard.decode.shortlist import FILE, NONE, Shortlist, ShortlistedModel
from regard.runs.job import Job
from regard.tasks.load import load
from regard.train.job import start

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
LINES = [(f"{a} {b} {c}", f"{c.upper()} {b.upper()} {a.upper()}") for a in WORDS for b in WORDS[:4] for c in WORDS[2:7]]


def test_words_that_go_together_are_found():
    """Source word i always comes with target word 40 + i, between others that come at random."""
    rng = np.random.default_rng(1)
    pairs = []
    for _ in range(400):
        source = rng.choice(30, 6, replace=False)
        pairs.append((source.tolist(), [*(40 + source).tolist(), *rng.choice(20, 4).tolist()]))
    made = Shortlist.learn(pairs, (35, 80), each=3, common=5, always=[2, 79])
    assert made.likely[:30, 0].tolist() == list(range(40, 70))
    assert made.likely[30:].eq(NONE).all()
    assert {2, 79} <= set(made.common.tolist())
    assert len(made.common) <= 7
    among = made.tokens_for(torch.tensor([3, 4, 3]))
    assert {43, 44} <= set(among.tolist())
    assert among.tolist() == sorted(set(among.tolist()) - {NONE})
    assert len(among) <= 2 * 3 + 7


def test_nothing_to_learn_from():
    with pytest.raises(UserError, match="no pairs"):
        Shortlist.learn([([], [3])], (5, 5))


@pytest.mark.parametrize(
    "config",
    [
        DecodeConfig(),
        DecodeConfig(beam=3, num_return=2),
        DecodeConfig(temperature=1.0, top_k=5),
        DecodeConfig(repetition_penalty=1.5),
    ],
)
@pytest.mark.parametrize("name", ["transformer", "seq2seq-luong", "t5"])
def test_a_list_of_all_words_changes_nothing(name, config):
    torch.manual_seed(3)
    model = regard.build(name, size="tiny", vocab=23).double().eval()
    given = model.random_inputs(4, 7)
    with torch.no_grad():
        request = Request.after(2, 3, model.encode(given["source"]), 9)
    seeds = [1, 2, 3, 4] if config.samples else None
    wanted = search(model, request, config, seeds)
    few = ShortlistedModel(model, torch.arange(23))
    found = few.to_vocab_ids(search(few, few.to_shortlist_ids(request), config, seeds))
    assert [[one.tokens for one in row] for row in found] == [[one.tokens for one in row] for row in wanted]
    some = torch.tensor([2, 3, 7, 11, 20])
    few = ShortlistedModel(model, some)
    for row in few.to_vocab_ids(search(few, few.to_shortlist_ids(request), config, seeds)):
        for one in row:
            assert set(one.tokens) <= set(some.tolist())
            assert one.logprob <= 0


def test_a_list_is_of_its_own_vocabulary(tmp_path):
    with pytest.raises(UserError, match="regard shortlist"):
        Shortlist.load(tmp_path / FILE, (5, 5))
    Shortlist(torch.zeros(4, 2, dtype=torch.int32), torch.tensor([1])).save(tmp_path / FILE)
    with pytest.raises(UserError, match="another vocabulary"):
        Shortlist.load(tmp_path / FILE, (5, 5))
    assert Shortlist.load(tmp_path / FILE, (4, 5)).common.tolist() == [1]
    (tmp_path / FILE).write_bytes(b"nothing")
    with pytest.raises(UserError, match="cannot be read"):
        Shortlist.load(tmp_path / FILE, (5, 5))


def test_from_the_command_line(tmp_path, capsys):
    (tmp_path / "data.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in LINES))
    sets = ["model.width=32", "model.heads=2", "model.depth=1", "train.steps=60", "train.lr=0.01", "model.dropout=0"]
    job = Job(
        "transformer", str(tmp_path / "run"), None, [*sets, "train.batch_tokens=400", "train.warmup=5"],
        str(tmp_path / "data.tsv"), dev="8", tokenizer="words",
        as_published=True,
    )  # fmt: skip
    start(job, say=lambda sentence: None).train()
    run = str(tmp_path / "run")
    (tmp_path / "ask.txt").write_text("nine two three\nten\n")
    ask = ["predict", run, str(tmp_path / "ask.txt"), "--shortlist", "--json"]
    assert main(ask) == 2
    assert "make one by 'regard shortlist" in capsys.readouterr().err
    assert main(["shortlist", run, "--each", "2", "--common", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["each"] == 2
    assert main(ask) == 0
    few = [json.loads(line)[0]["tokens"] for line in capsys.readouterr().out.splitlines()]
    loaded = load(run)
    among = loaded.shortlist.tokens_for(torch.tensor(loaded.source.encode(["nine two three ten"])[0]))
    assert {"NINE", "TWO", "THREE", "TEN"} <= set(loaded.target.tokens(among.tolist()))
    assert len(among) < loaded.target.size
    assert {token for tokens in few for token in tokens} <= set(loaded.target.tokens(among.tolist()))
    assert main(["evaluate", run, "--part", "dev", "--shortlist", "--metric", "exact", "--json"]) == 0
    assert "exact" in json.loads(capsys.readouterr().out)["scores"]


def test_a_language_model_has_none(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("one two three four five six seven\n" * 30)
    sets = [
        "model.width=16",
        "model.heads=2",
        "model.depth=1",
        "train.steps=2",
        "train.context_length=8",
        "train.batch_tokens=64",
    ]
    start(
        Job(
            "gpt2", str(tmp_path / "run"), None, sets, str(tmp_path / "text.txt"), tokenizer="words", as_published=True
        ),
        print,
    ).train()
    capsys.readouterr()
    (tmp_path / "ask.txt").write_text("one\n")
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "ask.txt"), "--shortlist"]) == 2
    assert "source into a target" in capsys.readouterr().err
    assert main(["shortlist", str(tmp_path / "run")]) == 2
    assert "turns a text into another" in capsys.readouterr().err
