"""Links, pipes and file names in an untrusted folder: nothing outside is read or written, and no pipe is waited for."""

import json
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from regard.cli import main
from regard.core import UserError
from regard.runs import checkpoint

SMALL = ["model.width=16", "model.heads=2", "model.depth=1", "train.batch_tokens=256", "train.save_steps=2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run, and what it was trained on."""
    folder = tmp_path_factory.mktemp("trained")
    words = [f"{a} {b}" for a in ("one", "two", "three") for b in ("four", "five", "six", "seven")]
    data = folder / "pairs.tsv"
    data.write_text("source\ttarget\n" + "".join(f"{text}\t{text[::-1]}\n" for text in words))
    given = ["train", "transformer", "--size", "tiny", "--data", str(data), "--tokenizer", "words", "--steps", "4"]
    given += [word for entry in SMALL for word in ("--set", entry)]
    assert main([*given, "--dev", "3", "--test", "3", "--out", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture(autouse=True)
def _in_time():
    """A test that waits for a pipe fails instead."""

    def late(*_):
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def contents(folder):
    """Return the state of every file below a folder, without following links."""
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.exists()}


COMMANDS = {
    "resume": lambda run, out: ["train", "--resume", str(run), "--steps", "6"],
    "predict": lambda run, out: ["predict", str(run), str(run.parent / "asked.txt")],
    "evaluate": lambda run, out: ["evaluate", str(run)],
    "export": lambda run, out: ["export", str(run), str(out), "--to", "ctranslate2"],
    "convert": lambda run, out: ["convert", str(run), str(out), "--to", "marian"],
    "from": lambda run, out: ["train", "--from", str(run), "--data", "pairs.tsv", "--steps", "2", "--out", str(out)],
    "shortlist": lambda run, out: ["shortlist", str(run)],
    "profile": lambda run, out: ["profile", str(run), "--rows", "2", "--length", "4"],
}
FILES = [
    "metrics.jsonl", "lock", "events.out.tfevents.*", "run.json", "recipe.toml", "tokenizer.json", "model.safetensors",
    "SHA256SUMS", "data", "data/train.arrow", "data/SHA256SUMS", "checkpoints", "checkpoints/step-00000004",
    "checkpoints/step-00000004/model.safetensors", "checkpoints/step-00000004/trainer.json",
]  # fmt: skip
PARTS = [
    "model.safetensors.part",
    "recipe.toml.part",
    "run.json.part",
    "shortlist.safetensors",
    "data/train.arrow.part",
]


def refused(run, command, capsys, word):
    """The command prints one sentence, exits with code 2, and changes nothing."""
    (run.parent / "asked.txt").write_text("one two\n")
    before = contents(run.parent)
    capsys.readouterr()
    assert main(COMMANDS[command](run, run.parent / "out")) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith("regard: ")
    assert "\n" not in told
    assert word in told
    assert contents(run.parent) == before
    assert not (run.parent / "out").exists()


def outside(path):
    """Move a file out of the folder and put a link to it in its place."""
    elsewhere = path.parents[[one.name for one in path.parents].index("run") + 1] / "elsewhere"
    if path.exists():
        path.rename(elsewhere)
    else:
        elsewhere.write_text("precious")
    path.symlink_to(elsewhere)


CASES = [
    (command, name)
    for command in COMMANDS
    for name in [*FILES, *PARTS]
    if command != "profile" or name in ("recipe.toml", "model.safetensors")
]  # it reads the model alone


@pytest.mark.parametrize(("command", "name"), CASES)
def test_a_link_that_leaves_a_run_folder_is_refused(run, command, name, capsys):
    path = next(run.glob(name), run / name)
    outside(path)
    refused(run, command, capsys, "is a link that leaves")


@pytest.mark.parametrize("command", ["resume", "predict"])
@pytest.mark.parametrize("target", ["/dev/zero", "/dev/null", "/nowhere/at/all", "../gone", "lock"])
def test_wherever_it_leads(run, command, target, capsys):
    """Links to a device, to nothing, and to themselves are refused."""
    (run / "lock").unlink()
    (run / "lock").symlink_to(target)
    refused(run, command, capsys, "is a link that leaves")


def pipe(path):
    os.mkfifo(path)


def listening(path):
    """The name of a socket must be short."""
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


@pytest.mark.parametrize("command", ["resume", "predict"])
@pytest.mark.parametrize("make", [pipe, listening])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_is_refused(run, command, make, name, capsys):
    path = next(run.glob(name))
    path.rename(run.parent / "away")
    make(path)
    refused(run, command, capsys, "is neither a file nor a folder")


def test_a_new_run_writes_through_no_link(trained, tmp_path, capsys):
    """The folder is there already, with nothing but a link in it."""
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "precious").write_text("precious")
    (out / "metrics.jsonl").symlink_to(tmp_path / "precious")
    given = ["train", "transformer", "--size", "tiny", "--data", str(trained.parent / "pairs.tsv"), "--steps", "2"]
    assert main([*given, "--tokenizer", "words", "--out", str(out)]) == 2
    assert "metrics.jsonl is a link that leaves" in capsys.readouterr().err
    assert (tmp_path / "precious").read_text() == "precious"
    assert os.listdir(out) == ["metrics.jsonl"]


def test_links_that_stay_inside_are_fine(run, tmp_path, capsys):
    """A run folder that is itself a link is checked as well."""
    (run / "model.safetensors").rename(run / "weights")
    (run / "model.safetensors").symlink_to("weights")
    (run / "metrics.jsonl").rename(run / "lines")
    (run / "metrics.jsonl").symlink_to(run / "lines")
    (run / "checkpoints" / "newest").symlink_to("step-00000004")
    (run / "data" / "later").symlink_to("nothing")
    (tmp_path / "door").symlink_to(run)
    (tmp_path / "asked.txt").write_text("one two\n")
    assert main(COMMANDS["predict"](tmp_path / "door", tmp_path / "out")) == 0
    assert main(COMMANDS["resume"](tmp_path / "door", tmp_path / "out")) == 0
    assert json.loads((run / "lines").read_text().splitlines()[-1])["step"] == 6


def test_a_model_is_neither_saved_nor_restored_through_a_link(tmp_path):
    made = regard.build("gpt2", vocab=31, overrides=["model.width=12", "model.heads=3", "model.depth=1"])
    precious = tmp_path / "precious"
    for name in ("model.safetensors", "model.safetensors.part", "recipe.toml", "recipe.toml.part"):
        precious.write_text("precious")
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).symlink_to(precious)
        with pytest.raises(UserError, match="is a link that leaves"):
            regard.save(made, folder)
        assert os.listdir(folder) == [name]
        assert precious.read_text() == "precious"
    folder = tmp_path / "whole"
    regard.save(made, folder)
    (folder / "model.safetensors").rename(precious)
    (folder / "model.safetensors").symlink_to(precious)
    with pytest.raises(UserError, match="is a link that leaves"):
        regard.restore(folder)


@pytest.mark.parametrize("command", ["merge", "pack"])
@pytest.mark.parametrize("name", ["notes.json", "origin", "origin/vocab.txt"])
def test_nothing_is_copied_from_outside(tmp_path, command, name, capsys):
    sets = [f"model.passes=[{{part='{'lora' if command == 'merge' else 'bitnet'}'}}]"]
    run = tmp_path / "run"
    regard.save(regard.build("llama", size="tiny", vocab=31, overrides=sets), run)
    (run / "origin").mkdir()
    (run / "origin" / "vocab.txt").write_text("a")
    assert main([command, str(run), str(tmp_path / "fine")]) == 0
    assert (tmp_path / "fine" / "origin" / "vocab.txt").read_text() == "a"
    outside(run / name)
    capsys.readouterr()
    assert main([command, str(run), str(tmp_path / "out")]) == 2
    assert "is a link that leaves" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_folders_that_hold_themselves_are_not_copied_for_ever(tmp_path):
    """Links to folders inside are left out of what is copied."""
    run = tmp_path / "run"
    sets = ["model.passes=[{part='lora'}]"]
    regard.save(regard.build("llama", size="tiny", vocab=31, overrides=sets), run)
    (run / "origin" / "more").mkdir(parents=True)
    (run / "origin" / "more" / "vocab.txt").write_text("a")
    for name in "abc":
        (run / "origin" / "more" / name).symlink_to(run / "origin")
    assert main(["merge", str(run), str(tmp_path / "out")]) == 0
    assert [path.name for path in (tmp_path / "out" / "origin").rglob("*")] == ["more", "vocab.txt"]


# Folders in the Hugging Face layout.


@pytest.fixture
def theirs(tmp_path):
    run, out = tmp_path / "first", tmp_path / "theirs"
    sets = ["model.width=12", "model.heads=3", "model.depth=1", "model.embed.position.length=16"]
    regard.save(regard.build("gpt2", vocab=31, overrides=sets), run)
    (run / "run.json").write_text(json.dumps({"job": {"recipe": "gpt2"}}))
    assert main(["convert", str(run), str(out)]) == 0
    (out / "README.md").write_text("read me")
    (out / "1_Pooling").mkdir()
    (out / "1_Pooling" / "config.json").write_text("{}")
    return out


def comes_in(folder, capsys, *more):
    """Return the exit code and the message; the converted run is `again`, next to it."""
    capsys.readouterr()
    code = main(["convert", str(folder), str(folder.parent / "again"), *more])
    told = capsys.readouterr().err.strip()
    assert code == 0 or "\n" not in told
    assert (folder.parent / "again").exists() == (code == 0)
    return code, told


NAMES = ["config.json", "model.safetensors", "README.md", "1_Pooling", "1_Pooling/config.json", "vocab.txt"]


@pytest.mark.parametrize("name", NAMES)
def test_a_link_that_leaves_a_model_folder_is_refused(theirs, name, capsys):
    path = theirs / name
    if path.exists():
        path.rename(theirs.parent / "elsewhere")
    else:
        (theirs.parent / "elsewhere").write_text("a\n")
    path.symlink_to(theirs.parent / "elsewhere")
    code, told = comes_in(theirs, capsys)
    assert code == 2
    assert f"{name} is a link that leaves" in told


@pytest.mark.parametrize("name", NAMES)
def test_a_pipe_in_a_model_folder_is_refused(theirs, name, capsys):
    path = theirs / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    os.mkfifo(path)
    code, told = comes_in(theirs, capsys)
    assert code == 2
    assert "is neither a file nor a folder" in told


def as_in_the_cache(folder):
    """The same folder as the Hugging Face hub lays it out: snapshots/REVISION/NAME -> ../../blobs/HASH."""
    root = folder.parent / "hub" / "models--some--gpt2"
    shutil.copytree(folder, root / "snapshots" / "0a1b")
    (root / "blobs").mkdir()
    for number, path in enumerate(sorted(root.glob("snapshots/0a1b/**/*"))):
        if path.is_file():
            blob = root / "blobs" / f"{number:040x}"
            path.rename(blob)
            path.symlink_to(os.path.relpath(blob, path.parent))
    return root / "snapshots" / "0a1b"


def test_the_cache_of_the_hub_is_read(theirs, capsys):
    snapshot = as_in_the_cache(theirs)
    code, _ = comes_in(snapshot, capsys)
    assert code == 0
    kept = snapshot.parent / "again" / "origin"
    assert (kept / "README.md").read_text() == "read me"
    assert not any(path.is_symlink() for path in kept.rglob("*"))


@pytest.mark.parametrize("through", ["a blob", "another folder", "blobs by name alone"])
def test_nothing_but_that_cache_is(theirs, capsys, through):
    """Refuse a blob that is itself a link, a link to another folder, and a folder that only has the name."""
    snapshot, precious = as_in_the_cache(theirs), theirs.parent / "precious"
    precious.write_text("precious")
    path = snapshot / "README.md"
    if through == "a blob":
        path.resolve().unlink()
        Path(os.path.abspath(snapshot / os.readlink(path))).symlink_to(precious)
    else:
        other = snapshot.parent.parent / "refs" if through == "another folder" else theirs.parent / "blobs"
        other.mkdir()
        shutil.copy(precious, other / "0a1b")
        path.unlink()
        path.symlink_to(other / "0a1b")
    code, told = comes_in(snapshot, capsys)
    assert code == 2
    assert "README.md is a link that leaves" in told


@pytest.mark.parametrize("name", ["../precious.bin", "{}/precious.bin", "sub/../../precious.bin", "/dev/zero", 7, None])
@pytest.mark.parametrize("kind", ["pytorch_model.bin.index.json", "model.safetensors.index.json"])
def test_an_index_names_no_file_outside(theirs, tmp_path, capsys, kind, name):
    name = name.format(tmp_path) if isinstance(name, str) else name
    tensors = load_file(theirs / "model.safetensors")
    (theirs / "model.safetensors").unlink()
    (theirs / "sub").mkdir()
    torch.save(tensors, tmp_path / "precious.bin") if "pytorch" in kind else save_file(
        tensors, tmp_path / "precious.bin"
    )
    (theirs / kind).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
    code, told = comes_in(theirs, capsys, "--pickle")
    assert code == 2
    told_of = f" names the file '{name}', which is not there" if isinstance(name, str) else "should be a string"
    assert kind in told
    assert told_of in told


def test_an_index_of_pickles_is_read(theirs, capsys):
    tensors = load_file(theirs / "model.safetensors")
    (theirs / "model.safetensors").unlink()
    torch.save(tensors, theirs / "pytorch_model-1.bin")
    index = {"weight_map": dict.fromkeys(tensors, "pytorch_model-1.bin")}
    (theirs / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert comes_in(theirs, capsys, "--pickle")[0] == 0


@pytest.mark.parametrize("path", ["../pooling", "{}/pooling", 7])
def test_sentence_transformers_names_no_folder_outside(tmp_path, path):
    from regard.convert import sentences

    (tmp_path / "pooling").mkdir()
    (tmp_path / "pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    folder = tmp_path / "model"
    folder.mkdir()
    path = path.format(tmp_path) if isinstance(path, str) else path
    kinds = {"Transformer": "", "Pooling": path}
    (folder / "modules.json").write_text(json.dumps([{"type": f"x.{kind}", "path": at} for kind, at in kinds.items()]))
    with pytest.raises(UserError, match=r"modules.json(: .* should be a string| names '.*', which is not in)"):
        sentences.read(folder)


def test_the_lock_is_held_where_it_lies(run):
    """Nothing is written to the target of a link."""
    (run / "lock").unlink()
    (run / "lock").symlink_to(run.parent / "precious")
    with pytest.raises(UserError, match="is a link that leaves"), checkpoint.locked(run):
        pass
    assert not (run.parent / "precious").exists()
