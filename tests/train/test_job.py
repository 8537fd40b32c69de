"""From what a user asks to a run folder that holds everything."""

import json
import os
import struct
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch
from tensorboardX.proto.event_pb2 import Event, SessionLog

import regard
from regard import UserError
from regard.data import IGNORE
from regard.runs import checkpoint
from regard.tasks.dev import windows
from regard.train.job import resume, start


def quiet(sentence):
    pass


def events(path):
    """What an events file tells, as tensorboard reads it: length, check sum, message, check sum."""
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        found.append(Event.FromString(data[at + 12 : at + 12 + length]))
        at += 16 + length
    return found


def lines(folder, kind):
    every = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in every if kind in line]


def test_a_run(job, tmp_path):
    """Complete before it is trained, and afterwards a model that answers."""
    asked = job(metric="token_error", eval_steps=4)
    prepared = start(asked, quiet)
    folder = tmp_path / "run"
    there = {path.name for path in folder.iterdir()}
    assert there == {"recipe.toml", "run.json", "source.tokenizer.json", "target.tokenizer.json", "data", "lock"}
    recipe = tomllib.loads((folder / "recipe.toml").read_text())
    assert recipe["train"]["steps"] == 12
    assert recipe["train"]["max_grad_norm"] == 1.0, "what was not said, too"
    assert recipe["model"]["width"] == 8
    told = json.loads((folder / "run.json").read_text())
    assert told["sessions"][0]["versions"]["torch"] == torch.__version__
    assert told["sessions"][0]["command"]
    assert told["parameters"] == sum(p.numel() for p in prepared.model.parameters())
    seen = []
    run = prepared.train(seen.append)
    assert [progress.step for progress in seen] == list(range(1, 13))
    assert set(seen[-1].metrics) == {"loss", "perplexity", "token_error", "step"}
    assert [line["step"] for line in lines(folder, "dev")] == [4, 8, 12]
    text = run.predict(["abc"])[0][0].text
    assert regard.load(folder).predict(["abc"])[0][0].text == text
    scalars = {(v.tag, e.step) for file in folder.glob("events*") for e in events(file) for v in e.summary.value}
    assert {("train/loss", 10), ("train/lr", 10), ("train/tokens_per_second", 10)} <= scalars
    assert {("dev/token_error", step) for step in (4, 8, 12)} <= scalars


def test_it_goes_on(job, tmp_path):
    """From elsewhere, past its end, and the new end stays."""
    folder = tmp_path / "run"
    start(job(save_steps=5), quiet).train()
    said = []
    longer = resume(folder, {"steps": 17}, said.append)
    longer.train()
    assert "going on from step 12" in said
    assert longer.trainer.step == 17
    again = resume(folder, say=quiet)
    again.train()
    assert again.settings.steps == 17
    assert [line["step"] for line in lines(folder, "lr")] == list(range(1, 18))
    assert len(json.loads((folder / "run.json").read_text())["sessions"]) == 3
    first, second, _ = sorted(folder.glob("events*"), key=lambda path: path.suffix)
    assert any(e.session_log.status == SessionLog.START and e.step == 13 for e in events(second))
    assert max(e.step for e in events(first)) == 12
    with pytest.raises(UserError, match="epochs count from the beginning of a run"):
        resume(folder, {"epochs": 1}, quiet)
    resume(folder, {"epochs": 3}, quiet).train()
    with pytest.raises(UserError, match="not in 'lr'"):
        resume(folder, {"lr": 3}, quiet)


def test_the_same_from_anywhere(job, pairs, tmp_path, monkeypatch):
    monkeypatch.chdir(pairs.parent)
    start(job(job={"data": pairs.name}), quiet).train()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    resume("../run", {"steps": 14}, quiet).train()


def test_data_that_changed(job, pairs, tmp_path):
    """Is refused; a file that was only copied or touched is not."""
    start(job(), quiet).train()
    old = pairs.read_text()
    os.utime(pairs, (1, 1))
    resume(tmp_path / "run", {"steps": 13}, quiet).train()
    pairs.write_text(old.replace("A", "B"))
    with pytest.raises(UserError, match="the data is not what it was when this run began"):
        resume(tmp_path / "run", {"steps": 14}, quiet)
    pairs.write_text(old)
    resume(tmp_path / "run", {"steps": 14}, quiet).train()
    pairs.unlink()
    with pytest.raises(UserError, match=r"words\.tsv"):
        resume(tmp_path / "run", {"steps": 15}, quiet)


def test_a_folder_that_holds_a_run(job, tmp_path):
    prepared = start(job(), quiet)
    with pytest.raises(UserError, match="holds a run already: go on with it by --resume"):
        start(job(), quiet)
    refused = []

    def other(progress):
        for begin in (lambda: start(job(), quiet), lambda: resume(tmp_path / "run", say=quiet)):
            with pytest.raises(UserError, match="in use by another process"):
                begin()
            refused.append(1)

    prepared.train(other)
    assert len(refused) == 24
    with pytest.raises(UserError, match="holds no run to go on with"):
        resume(tmp_path / "nothing", say=quiet)
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"steps": 0}, "a run needs an end"),
        ({"metric": "blue"}, "did you mean 'bleu'"),
        ({"warmupp": 3}, "did you mean 'train.warmup'"),
        ({"job": {"metrics": ["wer"]}}, "unknown metric 'wer'"),
        (
            {"job": {"metrics": ["accuracy"]}},
            "'accuracy' means nothing for this model: those that do are loss, perplexity, bleu",
        ),
        ({"metric": "spearman"}, "'spearman' means nothing for this model"),
        ({"job": {"device": "abacus"}}, "there is no device 'abacus' here"),
        ({"job": {"recipe": "transformer-encoder", "overrides": ["train.steps=3"]}}, "two of them, with a comma"),
        ({"job": {"data": "nowhere.tsv"}}, "nowhere.tsv"),
        ({"job": {"dev": "0"}, "patience": 3}, "there is no dev set, and 'patience' needs one"),
        ({"job": {"dev": "0"}, "metric": "bleu"}, "there is no dev set, and 'bleu' needs one"),
        ({"job": {"tokenizer": "a,b,c"}}, "one for both sides, or two"),
        ({"job": {"longest": 1}}, "short enough"),
    ],
)
def test_refused(job, tmp_path, given, told):
    """In a sentence, and so that it can be tried again in the same folder."""
    with pytest.raises(UserError) as error:
        start(job(**given), quiet)
    assert told in str(error.value)
    assert not (tmp_path / "run" / "run.json").exists()
    start(job(), quiet)


def test_a_pattern_that_would_blind_some_of_the_data(job, tmp_path):
    """Before it learns anything, since only some lengths are concerned."""
    asked = job()
    blinds = "model.encoder.layer.0.mixer.pattern=random_blocks(1, 2, seed=0, of=1024)"
    with pytest.raises(UserError, match=r"leaves position \d of a sequence of \d+ with nothing to see: add") as error:
        start(replace(asked, overrides=[*asked.overrides, blinds]), quiet)
    assert "layer[0].mixer" in str(error.value)
    assert not (tmp_path / "run" / "run.json").exists()


def test_another_tokenizer(job, tmp_path):
    start(job(), quiet)
    path = tmp_path / "run" / "source.tokenizer.json"
    path.write_text(path.read_text().replace('"a"', '"z"'))
    with pytest.raises(UserError, match="the tokenizer is not the one that this run began with"):
        resume(tmp_path / "run", say=quiet)


def test_a_run_json_that_is_none(job, tmp_path):
    start(job(), quiet)
    (tmp_path / "run" / "run.json").write_text('{"job": {"colour": "red"}}')
    with pytest.raises(UserError, match="does not describe a run"):
        resume(tmp_path / "run", say=quiet)


def test_positions_limit_what_is_learned(job, tmp_path):
    """Of either side: a source that is too long is left out, and is no accident in the middle of a run."""
    asked = job(eval_steps=6)
    asked.overrides += ['model.encoder.embed={ part = "tokens", position = { part = "learned", length = 5 } }']
    said = []
    start(asked, said.append).train()
    assert [s for s in said if "left out" in s] == ["43 examples are longer than 5 and 80 tokens and left out"]


TEXT = "the cat sat on the mat, and the rat ran to the cat; " * 60
LANGUAGE = ["model.width=12", "model.depth=1", "model.heads=2", "model.layer.0.feedforward.hidden=16", "train.lr=0.02"]


@pytest.fixture
def language(job, tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(TEXT[i : i + 90] for i in range(0, len(TEXT), 90)))

    def make(*overrides):
        asked = job()
        asked.recipe, asked.data, asked.tokenizer = "transformer-decoder", str(tmp_path / "text.txt"), None
        asked.overrides = [*LANGUAGE, "train.steps=60", "train.context_length=20", "train.batch_size=6", *overrides]
        return asked

    return make


def test_a_language_model(language, tmp_path):
    prepared = start(language("train.eval_steps=20", "train.warmup=10"), quiet)
    prepared.train()
    found = [line["dev"]["perplexity"] for line in lines(tmp_path / "run", "dev")]
    assert len(found) == 3
    assert found[0] > found[1] > found[2]
    assert found[2] < 0.6 * prepared.task.target.size


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.metric=bleu", "'bleu' means nothing for this model: those that do are loss, perplexity"),
        ("model.embed.position={ part = 'learned', length = 8 }", "the positions of this model reach only 8"),
    ],
)
def test_refused_for_a_language_model(language, tmp_path, override, told):
    with pytest.raises(UserError, match=told):
        start(language(override), quiet)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("length", [1, 3, 4, 6, 7, 8, 35, 36, 50])
@pytest.mark.parametrize("overlap", [0, 3])
def test_every_token_once(length, overlap):
    """Each after the one before it, and the first after what is given."""
    text = np.arange(100, 100 + length, dtype=np.int32)
    asked = []
    for batch in windows(text, 99, 7, 5, 0, overlap):
        valid = batch.targets != IGNORE
        assert batch.count == int(valid.sum())
        assert torch.equal(batch.tokens[valid] + 1, batch.targets[valid])
        if not overlap:
            assert torch.equal(valid, torch.ones_like(valid) if batch.valid is None else batch.valid)
        assert batch.tokens.shape[0] <= 5
        assert batch.tokens.shape[1] <= 7
        asked += batch.targets[valid].tolist()
    assert asked == text.tolist()


def test_dev_loss_by_hand(language):
    """Of the whole text in windows, token by token."""
    prepared = start(language(), quiet)
    dev, model = prepared.trainer.evaluate, prepared.model.eval()
    text = np.fromfile(prepared.folder / "data" / "dev.ids", np.int32)
    before = regard.tasks.run.Run(model, prepared.task.source, prepared.task.target, documents=False).decoder_prefix[-1]
    total = 0.0
    with torch.no_grad():
        for begin in range(0, len(text), 20):
            some = torch.tensor(text[begin : begin + 20], dtype=torch.long)
            read = torch.tensor([text[begin - 1] if begin else before, *some[:-1]])
            total -= float(model(read[None])[0].log_softmax(-1).gather(1, some[:, None]).sum())
        assert dev(model)["loss"] == pytest.approx(total / len(text), rel=1e-5)


def test_checkpoints_are_checked_by_anyone(job, tmp_path):
    """In the form of the program sha256sum."""
    start(job(), quiet).train()
    newest = checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    assert (newest / "SHA256SUMS").read_text() == checkpoint.sha256_sums(
        newest, ["model.safetensors", "trainer.safetensors", "trainer.json"]
    )
