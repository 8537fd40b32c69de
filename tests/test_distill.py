"""Distillation: the pairs that a teacher makes, on disk and in training; a killed call loses nothing and changes
nothing; and a judge that ranks the answers of a student."""

import fcntl
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import regard
from regard.cli import main
from regard.core import UserError
from regard.data import open_corpus
from regard.decode import DecodeConfig
from regard.distill import distill
from regard.tasks import no_progress
from regard.train import job as jobs

NAT = ["model.width=8", "model.depth=1", "model.heads=2", "train.steps=4", "train.batch_tokens=80", "train.warmup=1"]
NAT += [f"model.{side}.layer.0.feedforward.hidden=12" for side in ("encoder", "decoder")]


def quiet(sentence: str) -> None:
    pass


@pytest.fixture
def teacher(job):
    """A run that has learned a little."""
    return jobs.start(job("teacher", steps=150, lr=0.03), quiet).train()


@pytest.fixture
def lines(pairs):
    return open_corpus(pairs, dev=0, test=0).train


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr("regard.distill.PIECE", 16)


class KilledError(Exception):
    pass


def killed_after(pieces: int):
    """Return a tick that raises after so many pieces."""
    done = []

    def tick(count: int) -> None:
        done.append(count)
        if len(done) > pieces:  # the first call tells of an earlier one
            raise KilledError

    return tick


def test_the_file_holds_what_the_teacher_says(teacher, lines, tmp_path):
    out = tmp_path / "new" / "out.tsv"
    found = distill(teacher, lines, out)
    sources = [source for source, _ in lines]
    said = [answers[0].text for answers in teacher.predict(sources)]
    written = [tuple(line.split("\t")) for line in out.read_text("utf-8").splitlines()]
    assert written == [pair for pair in zip(sources, said, strict=True) if pair[1]]
    assert (found.sources, found.pairs) == (len(sources), len(written))
    assert [path.name for path in out.parent.iterdir()] == ["out.tsv"]
    assert open_corpus(out, dev=0, test=0).train.count == len(written)


@pytest.mark.parametrize("config", [{}, {"temperature": 1.3}, {"beam": 3, "num_return": 3}])
def test_a_killed_call_goes_on(teacher, lines, tmp_path, small_pieces, config):
    """Also where the kill came between the piece and its state, and left half a line."""
    config = DecodeConfig(**config)
    whole, other = tmp_path / "whole.jsonl", tmp_path / "other.jsonl"
    distill(teacher, lines, whole, config)
    with pytest.raises(KilledError):
        distill(teacher, lines, other, config, tick=killed_after(2))
    assert not other.exists()
    with open(f"{other}.part", "ab") as file:
        file.write(b'{"source": "half a')
    seen: list[int] = []
    distill(teacher, lines, other, config, tick=seen.append)
    assert seen[0] == 32
    assert sum(seen) == lines.count
    assert other.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.glob("*other*")) == ["other.jsonl"]


def test_samples_and_best_answers(teacher, lines, tmp_path):
    counts = {}
    for name, config, samples in (
        ("one", DecodeConfig(), 1),
        ("best", DecodeConfig(beam=3, num_return=3), 1),
        ("drawn", DecodeConfig(temperature=1.5), 3),
    ):
        out = tmp_path / f"{name}.jsonl"
        counts[name] = distill(teacher, lines, out, config, samples).pairs
        rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
        assert len({(row["source"], row["target"]) for row in rows}) == len(rows)
    assert counts["best"] > 2 * counts["one"]
    assert counts["drawn"] > 1.5 * counts["one"]


def test_what_is_refused(teacher, lines, pairs, tmp_path, small_pieces):
    out = tmp_path / "out.tsv"
    with pytest.raises(UserError, match="need a temperature"):
        distill(teacher, lines, out, samples=2)
    with pytest.raises(UserError, match=r"written as \.tsv or \.jsonl"):
        distill(teacher, lines, tmp_path / "out.csv")
    with pytest.raises(KilledError):
        distill(teacher, lines, out, tick=killed_after(1))
    with pytest.raises(UserError, match=r"other settings, and 16 sources of it are done.*out\.tsv\.part\.json"):
        distill(teacher, lines, out, DecodeConfig(beam=3))
    distill(teacher, lines, out)
    with pytest.raises(UserError, match="exists already"):
        distill(teacher, lines, out)
    tabs = tmp_path / "tabs.jsonl"
    tabs.write_text('{"source": "a\\tb", "target": "A B"}\n')
    with pytest.raises(UserError, match=r"source 1 of .*tabs\.jsonl holds a tab.*\.jsonl"):
        distill(teacher, open_corpus(tabs, dev=0, test=0).train, tmp_path / "new.tsv")
    assert not list(tmp_path.glob("new*"))


@pytest.mark.parametrize(
    "change",
    [
        {"bytes": 10**6}, {"bytes": -1}, {"bytes": True}, {"bytes": 1.5}, {"bytes": 2**70}, {"sources": 10**9},
        {"sources": -5}, {"pairs": 3}, {"bytes": 5}, {"key": 7}, {"key": "x", "sources": "y"}, None,
    ],
    ids=str,
)  # fmt: skip
def test_damaged_states(teacher, lines, tmp_path, small_pieces, change):
    """Of a stranger or of a bad disk: one sentence, and nothing is cut, filled or believed."""
    out = tmp_path / "out.tsv"
    with pytest.raises(KilledError):
        distill(teacher, lines, out, tick=killed_after(2))
    state, part = Path(f"{out}.part.json"), Path(f"{out}.part")
    before = part.read_bytes()
    table = json.loads(state.read_text())
    state.write_text("[" * 100_000 if change is None else json.dumps(table | change))
    with pytest.raises(UserError, match=r"out\.tsv\.part\.json"):
        distill(teacher, lines, out)
    assert part.read_bytes() == before
    assert not out.exists()


def test_pairs_that_are_gone_are_made_again(teacher, lines, tmp_path, small_pieces):
    whole, out = tmp_path / "whole.tsv", tmp_path / "out.tsv"
    distill(teacher, lines, whole)
    with pytest.raises(KilledError):
        distill(teacher, lines, out, tick=killed_after(2))
    Path(f"{out}.part").unlink()
    distill(teacher, lines, out)
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("name", ["out.tsv.part", "out.tsv.part.json", "out.tsv.part.json.part"])
@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
def test_links_and_pipes_are_not_followed(teacher, lines, tmp_path, name, kind):
    victim, place = tmp_path / "victim", tmp_path / name
    victim.write_text("mine")
    if kind == "link":
        place.symlink_to(victim)
    elif kind == "hard link":
        place.hardlink_to(victim)
    else:
        os.mkfifo(place)
    with pytest.raises(UserError, match="is a link or no file"):
        distill(teacher, lines, tmp_path / "out.tsv")
    assert victim.read_text() == "mine"


def test_somebody_elses_file_is_not_cut(teacher, lines, tmp_path):
    (tmp_path / "out.tsv.part").write_text("my notes")
    with pytest.raises(UserError, match="is in the way"):
        distill(teacher, lines, tmp_path / "out.tsv")
    assert (tmp_path / "out.tsv.part").read_text() == "my notes"


def test_a_file_that_another_process_finishes_meanwhile_is_kept(teacher, lines, tmp_path, monkeypatch):
    out, lock = tmp_path / "out.tsv", fcntl.flock
    once: list[int] = []

    def finish_first(file, how):
        if not once:
            once.append(1)
            distill(teacher, lines, out)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", finish_first)
    with pytest.raises(UserError, match="finished by another process"):
        distill(teacher, lines, out)
    assert out.stat().st_size > 0


def test_the_command(teacher, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert main(["distill", str(teacher.folder), "--out", str(out), "--beam", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["pairs"] == len(out.read_text("utf-8").splitlines()) > 50
    assert main(["distill", str(teacher.folder), "--out", str(out), "--samples", "2"]) == 2
    assert "say --temperature" in capsys.readouterr().err


def student(job, teacher, run="student", **changes):
    """Return the job of a student without data or a tokenizer of its own."""
    own = {"recipe": "nat", "overrides": NAT, "teacher": str(teacher.folder), "data": None, "dev": None, "test": None}
    return job(run, own | {"tokenizer": None} | changes)


def test_a_student_learns_what_its_teacher_says(job, teacher, tmp_path, small_pieces):
    """With the teacher's data and tokens, and the same after a kill amid the distillation."""
    said: list[str] = []
    run = jobs.start(student(job, teacher), said.append).train()
    assert any(sentence.startswith("distilled: ") for sentence in said)
    path = Path(run.folder) / "data" / "distilled.jsonl"
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    answers = teacher.predict([row["source"] for row in rows])
    assert [row["target"] for row in rows] == [found[0].text for found in answers]
    assert run.target.hash() == teacher.target.hash()
    assert regard.load(run.folder).predict(["abc"])

    def tick(what: str, done: int) -> None:
        if what.startswith("distilling") and done >= 32:
            raise KilledError

    with pytest.raises(KilledError):
        jobs.start(student(job, teacher, "other"), quiet, tick)
    other = jobs.resume(tmp_path / "other", say=quiet).train()
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, other.model.state_dict()[name]), name


def test_a_new_attempt_asks_its_own_teacher(job, teacher, pairs, tmp_path):
    """The answers of an attempt that was refused are not taken for those of another teacher."""
    with pytest.raises(UserError, match="does not fit on the canvas"):
        jobs.start(student(job, teacher, recipe="nat-ctc", overrides=[*NAT, "model.length.ratio=0.1"]), quiet)
    other = jobs.start(job("other", steps=150, lr=0.02), quiet).train()
    run = jobs.start(student(job, other), quiet).train()
    rows = [json.loads(line) for line in (run.folder / "data" / "distilled.jsonl").read_text("utf-8").splitlines()]
    answers = other.predict([row["source"] for row in rows])
    assert [row["target"] for row in rows] == [found[0].text for found in answers]


def test_a_finished_distillation_needs_no_teacher(job, teacher, tmp_path):
    jobs.start(student(job, teacher), quiet).train()
    Path(teacher.folder).rename(tmp_path / "gone")
    jobs.resume(tmp_path / "student", {"steps": 6}, quiet).train()


def test_teachers_that_are_refused(job, teacher, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("abc abc\n" * 200)
    decoder = ["train", "transformer-decoder", "--size", "tiny", "--data", str(text), "--steps", "1", "--tokenizer"]
    assert main([*decoder, "characters", "--out", str(tmp_path / "text"), "--set", "model.width=8"]) == 0
    capsys.readouterr()
    for arguments, wanted in (
        (["nat", "--teacher", str(tmp_path / "text")], "is not an encoder-decoder that turns a text into another"),
        (["nat", "--teacher", str(tmp_path / "none")], "there is no"),
        (["transformer-decoder", "--teacher", str(teacher.folder)], "a teacher is for recipes that turn a text into"),
        (["--teacher", str(teacher.folder)], "which recipe is the student"),
    ):
        out = tmp_path / "refused"
        assert main(["train", *arguments, "--size", "tiny", "--steps", "1", "--out", str(out)]) == 2
        assert wanted in capsys.readouterr().err
        assert not (out / "run.json").exists()
    assert main(["distill", str(tmp_path / "text"), "--out", str(tmp_path / "out.tsv")]) == 2
    assert "is not an encoder-decoder" in capsys.readouterr().err


def test_a_judge_ranks_answers(job, teacher, capsys, tmp_path, monkeypatch):
    """The best of several lengths by the judge's own log-probability."""
    run = jobs.start(student(job, teacher), quiet).train()
    texts, config = ["abcd", "a", "gfedcba"], replace(run.config, length_beam=4, num_return=4)
    plain = run.predict(texts, config)
    run.rescore = teacher
    judged = run.predict(texts, config)
    monkeypatch.setattr("regard.decode.rescore.MAX_LOGITS", 1)  # one answer at a time
    assert [[one.text for one in row] for row in run.predict(texts, config)] == [
        [one.text for one in r] for r in judged
    ]
    monkeypatch.undo()
    penalty = teacher.config.length_penalty
    for text, before, after in zip(texts, plain, judged, strict=True):
        assert sorted(one.text for one in before) == sorted(one.text for one in after)
        assert [one.score for one in after] == sorted((one.score for one in after), reverse=True)
        for one in after:
            ids = [teacher.target.inner.token_to_id(token) for token in one.tokens]
            source = torch.tensor(teacher.source.encode_with_special_tokens([text]))
            tokens = torch.tensor([[teacher.target.start, *ids]])
            with torch.no_grad():
                logs = teacher.model(tokens, source=source).log_softmax(-1)[0]
            said = float(logs[torch.arange(len(ids) + 1), [*ids, teacher.target.end]].sum())
            assert one.logprob == pytest.approx(said, abs=1e-4)
            assert one.score == pytest.approx(said / (len(ids) + 1) ** penalty, abs=1e-4)

    said = []
    for more in ([], ["--length-beam", "4"]):
        words = ["predict", str(run.folder), "--rescore", str(teacher.folder), *more, str(tmp_path / "in.txt")]
        (tmp_path / "in.txt").write_text("abcd\n")
        said.append((main(words), *capsys.readouterr()))
    assert said[0][0] == 2
    assert "say --length-beam 5" in said[0][2]
    assert said[1][:2] == (0, judged[0][0].text + "\n")


def test_judges_that_are_refused(job, teacher):
    run = jobs.start(student(job, teacher), quiet).train()
    with pytest.raises(UserError, match="writes one token after the other"):
        run.rescore = run
    other = jobs.start(job("other", {"tokenizer": "characters"}, steps=2), quiet).train()
    with pytest.raises(UserError, match="the very same tokens: train this one with --teacher"):
        run.rescore = other


def test_pairs_that_do_not_fit_on_the_canvas(job, tmp_path):
    """A few are left out, and told; many are refused, with the setting that would do."""
    path = tmp_path / "long.tsv"
    row = "abc\tA B C\n"
    own = {"recipe": "nat-ctc", "data": str(path), "dev": "0", "test": "0"}
    small = [*NAT, "model.length.extra=0", "model.length.ratio=2.0"]
    for count, refused in ((1, False), (20, True)):
        path.write_text(row * 300 + "abc\tA B C D A B C D A B C D\n" * count)
        said: list[str] = []
        begin = lambda more=(), count=count: jobs.start(  # noqa: E731
            job(f"run{count}{len(more)}", own | {"overrides": [*small, *more]}), said.append, no_progress
        )
        if refused:
            with pytest.raises(UserError, match=r"20 of 320 pairs .* canvas: --set model\.length\.ratio=3 would do"):
                begin()
            assert not (tmp_path / "run200" / "run.json").exists()
            begin(["model.length.ratio=3"]).train()
        else:
            begin().train()
            assert any("1 of 301 pairs" in sentence and "left out" in sentence for sentence in said)
