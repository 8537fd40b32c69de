"""Learning to transcribe tones that have names."""

import json
import wave

import numpy as np
import pytest
import torch

from regard.core import UserError
from regard.data import open_corpus
from regard.data.batches import IGNORE
from regard.data.mel import HOP, log_mel
from regard.data.recordings import RecordingBatches, prepare_sounds, teacher_forced_after
from regard.data.tokenizer import Tokenizer
from regard.evaluate import evaluate
from regard.runs.job import Job
from regard.tasks.load import load
from regard.train.job import resume, start

NAMES = {"low": 300, "middle": 1100, "high": 3500}
SMALL = ["model.width=24", "model.heads=3", "model.depth=1", "model.dropout=0.0", "model.encoder.embed.length=20",
         "model.encoder.embed.channels=12", "model.decoder.embed.position.length=20", "train.batch_size=9",
         "train.lr=0.01", "train.schedule=constant", "train.warmup=0", "train.eval_steps=60"]  # fmt: skip


def write(path, hertz, frames, seed):
    rng = np.random.default_rng(seed)
    count = frames * HOP // 2
    tone = np.sin(2 * np.pi * hertz * np.arange(count) / 8000 + rng.random()) * 0.4 + rng.normal(0, 0.02, count)
    with wave.open(str(path), "wb") as out:
        out.setparams((1, 2, 8000, 0, "NONE", ""))
        out.writeframes((tone * 2**15).astype("<i2").tobytes())


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Write 36 recordings in a folder next to the table, one of them too long."""
    folder = tmp_path_factory.mktemp("tones")
    (folder / "wav").mkdir()
    rows = []
    for number in range(36):
        name, hertz = list(NAMES.items())[number % 3]
        write(
            folder / "wav" / f"{number}.wav",
            hertz * (1 + number / 300),
            45 if number == 7 else 12 + number % 20,
            number,
        )
        rows.append(f"wav/{number}.wav\t{name}")
    (folder / "tones.tsv").write_text("\n".join(rows) + "\n")
    return folder / "tones.tsv"


def job(table, run, **more):
    given = {"tokenizer": "words", "dev": "6", "test": "3", "data": str(table)} | more
    sets = [*SMALL, *given.pop("sets", ["train.steps=60"])]
    return Job("whisper", str(run), "mini", sets, **given, as_published=True)


def test_tones_get_their_names(table, tmp_path):
    said = []
    start(job(table, tmp_path / "run", metrics=["exact"]), said.append).train()
    assert any("1 recordings are left out, for they are longer than the 0.4 s" in one for one in said)
    run = load(tmp_path / "run")
    assert type(run).__name__ == "Transcriber"
    files = [table.parent / "wav" / f"{number}.wav" for number in range(12)]
    answers = [best[0] for best in run.predict(files)]
    want = list(NAMES) * 4
    want[7] = "middle middle"  # it goes on in a second window
    assert [one.text for one in answers] == want
    assert answers[1].segments[0].start == 0.0
    assert answers[1].segments[0].end == pytest.approx(0.13)
    told = evaluate(run, open_corpus(str(table), kind="pairs").train, ["loss", "exact", "token_error"])
    assert told["scores"]["exact"] > 95
    assert told["scores"]["token_error"] < 5
    assert told["scores"]["loss"] < 0.2
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("exact" in json.dumps(line) for line in lines)


def test_a_run_that_goes_on_is_the_same(table, tmp_path):
    once = start(job(table, tmp_path / "once", sets=["train.steps=6"]), lambda said: None).train()
    half = start(job(table, tmp_path / "twice", sets=["train.steps=3"]), lambda said: None).train()
    twice = resume(tmp_path / "twice", {"steps": 6}, lambda said: None).train()
    wanted = once.model.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in twice.model.state_dict().items())
    assert not torch.equal(half.model.embed.table, twice.model.embed.table)


def test_batches(table, tmp_path):
    """A recording in a batch equals itself alone, and its text follows the prefix."""
    lines = open_corpus(str(table), kind="pairs").train
    words = Tokenizer.train("words", ["low middle high"])
    data = prepare_sounds(lines, words, tmp_path / "train.sounds", (40 * HOP, 9))
    assert data.left_out == 1
    batches = RecordingBatches(data, 5, 3, (40, 12), [words.start, 5, 6], words.pad)
    numbers = batches.epoch(0)
    assert sorted(n for some in numbers for n in some) == list(range(len(data)))
    assert [list(some) for some in numbers] != [list(some) for some in batches.epoch(1)]
    batch = batches.make(numbers[0])
    assert batch.source.shape == (5, 40, 12)
    alone = batches.make(numbers[0][2:3])
    assert torch.equal(batch.source[2], alone.source[0])
    sound = torch.from_numpy(np.array(data[int(numbers[0][2])][0])).float() / 2**15
    silent = torch.nn.functional.pad(sound, (0, 40 * HOP - len(sound)))
    assert torch.allclose(batch.source[2], log_mel(silent, 12))
    assert batch.tokens[:, :3].tolist() == [[words.start, 5, 6]] * 5
    assert (batch.targets[:, :2] == IGNORE).all()
    assert batch.count == 10


def test_texts_of_different_lengths():
    batch = teacher_forced_after([[7, 8, 1], [9, 1]], [2], 0)
    assert batch.tokens.tolist() == [[2, 7, 8], [2, 9, 1]]
    assert batch.targets.tolist() == [[7, 8, 1], [9, 1, IGNORE]]
    assert batch.valid.tolist() == [[True, True, True], [True, True, False]]
    assert batch.count == 5


def test_bad_recordings(table, tmp_path):
    words = Tokenizer.train("words", ["low middle high"])
    bad = table.parent / "bad.tsv"
    bad.write_text("wav/1.wav\tlow\nwav/gone.wav\thigh\nwav/2.wav\thigh\n")
    lines = open_corpus(str(bad), None, None, 0, 0, kind="pairs").train
    with pytest.raises(UserError, match=r"bad.tsv: the sound file .*gone.wav cannot be read: No such file"):
        prepare_sounds(lines, words, tmp_path / "a.sounds", (40 * HOP, 9))
    assert not list(tmp_path.iterdir())
    assert prepare_sounds(lines, words, tmp_path / "a.sounds", (40 * HOP, 9), skip=True).left_out == 1
    with pytest.raises(UserError, match=r"none of the 3 recordings is at most 0.01 s long"):
        prepare_sounds(lines, words, tmp_path / "b.sounds", (HOP, 9), skip=True)
