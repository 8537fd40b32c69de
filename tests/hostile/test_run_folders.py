"""Run folders from a stranger: whatever stands in them, an answer or one sentence."""

import json
import os
import resource
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regard.cli import main
from regard.runs import checkpoint

from .corpus import NASTY, NASTY_TOML, changed, damaged, dropped, outcome, places, text_run

FUZZ = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
FILES = ("run.json", "recipe.toml", "tokenizer.json", "model.safetensors", "texts.txt")
PREDICT = ("predict", "run", "run/texts.txt", "--max-new-tokens", "2")
QUICK = [PREDICT, ("evaluate", "run", "--data", "run/texts.txt"), ("evaluate", "run"), ("show", "run")]
DECODE = {
    "beam": 2,
    "max_new_tokens": 3,
    "max_source_tokens": 9,
    "max_batch_tokens": 50,
    "length_penalty": 1.0,
    "num_return": 1,
    "early_stopping": "full",
    "truncate": True,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a good run; whoever changes a file of it puts it back."""
    home = tmp_path_factory.mktemp("home")
    text_run(home / "run")
    assert outcome(home, *PREDICT) == ""
    return home


@pytest.fixture
def run(home):
    kept = {name: (home / "run" / name).read_bytes() for name in FILES}
    yield home / "run"
    for name, data in kept.items():
        (home / "run" / name).write_bytes(data)


ENTRIES = ["tokenizers", "documents", "marks", "labels", "origin", "target_marks"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_value_of_run_json(home, run, entry):
    told = json.loads((run / "run.json").read_text())
    told.setdefault(entry, {"family": "gpt2", "config": {}, "tensors": []} if entry == "origin" else None)
    for path in (place for place in places(told) if place[0] == entry):
        for made in (*(changed(told, path, value) for value in NASTY), dropped(told, path)):
            (run / "run.json").write_text(json.dumps(made))
            for arguments in QUICK:
                outcome(home, *arguments)
            if len(path) == 1:
                outcome(home, "convert", "run", "out")
                shutil.rmtree(home / "out", ignore_errors=True)


COMMANDS = {  # each is given a run folder; the slow ones are tried with fewer values
    "evaluate": (["evaluate", "run"], ["evaluate", "run", "--json", "--part", "train"]),
    "predict": (PREDICT,),
    "show": (["show", "run"], ["show", "run", "--json"]),
    "convert": (["convert", "run", "out"],),
    "train": (["train", "--from", "run", "--data", "run/texts.txt", "--steps", "1", "--dev", "0", "--out", "out"],),
    "profile": (["profile", "run", "--rows", "1", "--length", "4"],),
    "export": (["export", "run", "out", "--to", "ctranslate2"],),
}
SLOW = ("train", "profile", "export")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_value_of_the_job_in_every_command(home, run, command):
    told = json.loads((run / "run.json").read_text())
    told["job"] |= {"data": str(run / "texts.txt"), "test": "1", "overrides": ["a.b=1"], "size": None, "task": None}
    slow = command in SLOW
    paths = [("job",), ("job", "recipe"), ("job", "data")] if slow else [p for p in places(told) if p[0] == "job"]
    values = [None, 5, [], "\ud800", "x\0y"] if slow else [*NASTY, "\ud800", "x\0y", "x" * 5000, "texts.txt," * 3]
    for path in paths:
        for made in (*(changed(told, path, value) for value in values), dropped(told, path)):
            (run / "run.json").write_text(json.dumps(made))
            for arguments in COMMANDS[command]:
                outcome(home, *arguments)
                shutil.rmtree(home / "out", ignore_errors=True)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ({}, "does not record its training data"),
        ({"data": 5}, "run/run.json: job.data: is 5, and should be a string or null"),
        ([], "run/run.json: job: is [], and should be a table"),
    ],
)
def test_evaluate_a_run_that_describes_no_data(home, run, job, words):
    told = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(told | {"job": job}))
    assert words in outcome(home, "evaluate", "run")


@pytest.mark.parametrize("section", ["model", "objective", "decode", "vocab", "title"])
def test_every_value_of_the_recipe(home, run, section):
    recipe = tomllib.loads((run / "recipe.toml").read_text()) | {"decode": DECODE}
    for path in (place for place in places(recipe) if place[0] == section):
        for made in (*(changed(recipe, path, value) for value in NASTY_TOML), dropped(recipe, path)):
            (run / "recipe.toml").write_text(tomli_w.dumps(made))
            for arguments in QUICK:
                outcome(home, *arguments)


@pytest.mark.parametrize("name", FILES)
def test_every_file_damaged(home, run, name):
    for _, data in damaged((run / name).read_bytes()):
        (run / name).write_bytes(data)
        for arguments in QUICK:
            outcome(home, *arguments)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("1" * 100_000, "is not TOML"),
        ("0x" + "f" * 100_000, "holds a whole number of more than 64 bits"),
        ("[" * 60 + "]" * 60, "nested more than 40 deep"),
        ("[" * 100_000 + "]" * 100_000, "is not TOML"),
    ],
)
def test_numbers_and_nesting_beyond_all_use(home, run, change, words):
    (run / "recipe.toml").write_text(f"golden = {change}\n[model]\nwidth = 3\n")
    assert words in outcome(home, *PREDICT)


def test_an_unknown_objective_is_not_taken_for_a_language_model(home, run):
    text = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(text.replace('part = "next_token"', 'part = "next_tokn"'))
    assert "'next_tokn', which is unknown; did you mean 'next_token'?" in outcome(home, *PREDICT)


@pytest.mark.parametrize(
    ("entry", "value", "words"),
    [
        ("width", 10**9, "model.width must be at most 131,072, not 1,000,000,000"),
        ("depth", 10**6, "describes a model of 4.7 GB, and run/model.safetensors holds 7.4 kB"),
        ("heads", 10**9, "model.heads must be at most 8,192"),
        ("dropout", float("nan"), "model.dropout must be at least 0 and below 1"),
    ],
)
def test_sizes_beyond_all_use(home, run, entry, value, words):
    recipe = tomllib.loads((run / "recipe.toml").read_text())
    (run / "recipe.toml").write_text(tomli_w.dumps(changed(recipe, ("model", entry), value)))
    assert words in outcome(home, *PREDICT)


def test_a_recipe_that_describes_more_than_its_weights_hold(home, run):
    recipe = tomllib.loads((run / "recipe.toml").read_text())
    recipe["model"] |= {"width": 12288, "heads": 96}
    (run / "recipe.toml").write_text(tomli_w.dumps(recipe))
    told = outcome(home, *PREDICT)
    assert "recipe.toml: describes a model of " in told
    assert "GB, and run/model.safetensors holds " in told


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--beam", 10**9], "decode.beam must be at most 10,000, not 1,000,000,000"),
        (["--max-new-tokens", 10**12], "decode.max_new_tokens must be at most 2,147,483,647"),
        (["--max-new-tokens", 10**9], "decode.max_new_tokens must be at most 131,072"),
        (["--length-penalty", "1e9", "--beam", "2"], "decode.length_penalty must be from -10.0 to 10.0"),
        (["--temperature", "nan"], "decode.temperature must be a number, not nan"),
        (["--threads", 10**9], "less than or equal to 1024"),
    ],
)
def test_flags_beyond_all_use(home, flags, words):
    assert words in outcome(home, "predict", "run", "run/texts.txt", *flags)


def test_decoding_that_no_memory_could_hold(home, monkeypatch):
    from regard import memory

    monkeypatch.setattr(memory, "machine_memory", lambda: 10**6)
    told = outcome(home, "predict", "run", "run/texts.txt", "--beam", "5000", "--max-new-tokens", "300")
    assert "with a beam of 5,000 takes " in told
    assert "of memory, and this machine has 1.0 MB" in told


@given(st.data())
@FUZZ
def test_random_damage(home, data):
    """A few bytes of a file are changed, cut or repeated; JSON values are random."""
    name = data.draw(st.sampled_from(FILES))
    path = home / "run" / name
    good = path.read_bytes()
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(bad)))
        piece = data.draw(
            st.binary(max_size=6) | st.sampled_from([b"null", b"-1", b"1e999", b"[]", b"{}", b'"', b"9" * 40])
        )
        bad[at : at + data.draw(st.sampled_from([0, 1, len(piece), 300]))] = piece
    try:
        path.write_bytes(bytes(bad))
        outcome(home, *data.draw(st.sampled_from(QUICK)))
    finally:
        path.write_bytes(good)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
@FUZZ
def test_random_values(home, data):
    path = home / "run" / "run.json"
    good = path.read_text()
    told = json.loads(good)
    for _ in range(data.draw(st.integers(1, 3))):
        told = changed(told, data.draw(st.sampled_from(list(places(told)))), data.draw(VALUES))
    try:
        path.write_text(json.dumps(told))
        outcome(home, *data.draw(st.sampled_from(QUICK)))
    finally:
        path.write_text(good)


# A run that is gone on with


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with a run of two steps, its data beside it."""
    home = tmp_path_factory.mktemp("begun")
    (home / "pairs.tsv").write_text("source\ttarget\n" + "".join(f"a{n} b\tB A{n}\n" for n in range(40)))
    tiny = ["model.width=8", "model.depth=1", "model.heads=2", "train.batch_tokens=200", "train.warmup=1"]
    tiny += [f"model.{side}.layer.0.feedforward.hidden=12" for side in ("encoder", "decoder")]
    sets = [piece for one in tiny for piece in ("--set", one)]
    asked = ["train", "transformer", "--size", "tiny", "--data", "pairs.tsv", "--dev", "5", "--test", "0"]
    there = Path.cwd()
    os.chdir(home)
    try:
        assert main([*asked, "--tokenizer", "words", "--steps", "2", "--out", "run", *sets]) == 0
    finally:
        os.chdir(there)
    return home


@pytest.mark.parametrize("entry", ["data", "threads", "device", "overrides", "metrics", "longest", "lora", "task"])
def test_every_value_of_the_job(begun, entry):
    path = begun / "run" / "run.json"
    good = path.read_text()
    try:
        for value in NASTY:
            path.write_text(json.dumps(changed(json.loads(good), ("job", entry), value)))
            if not (entry == "threads" and value == 0) and value not in (None, [], True, ""):
                outcome(begun, "train", "--resume", "run", "--steps", "2")
    finally:
        path.write_text(good)


# In a process whose memory is limited


def limited(home: Path, *arguments: str) -> subprocess.CompletedProcess:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))

    command = [sys.executable, "-m", "regard", *map(str, arguments)]
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=home, preexec_fn=limit, capture_output=True, text=True, env=environment)


def test_a_model_of_fifty_gigabytes_takes_no_memory(home, run):
    recipe = tomllib.loads((run / "recipe.toml").read_text())
    recipe["model"] |= {"width": 4096, "heads": 32, "depth": 200}
    (home / "large.toml").write_text(tomli_w.dumps(recipe))
    told = limited(
        home, "train", "./large.toml", "--data", "run/texts.txt", "--steps", "1", "--dev", "0", "--test", "0"
    )
    assert told.returncode == 2, told.stderr
    assert "of memory, and this machine has 6.4 GB" in told.stderr
    assert "Traceback" not in told.stderr


NUMBERS = ["step", "tokens", "epoch", "taken", "elapsed", "pending", "best", "waited", "metrics", "optimizer"]


@pytest.mark.parametrize("entry", NUMBERS)
def test_every_number_of_a_checkpoint(begun, tmp_path, entry):
    """Their sums are right: whoever changes them can add up, too."""
    good = tmp_path / "good"
    shutil.copytree(begun / "run", good)
    for name in ("model.safetensors", "SHA256SUMS"):
        (good / name).unlink()
    told = json.loads((next((good / "checkpoints").glob("step-00000002*")) / "trainer.json").read_text())
    for path in (place for place in places(told) if place[0] == entry):
        for made in (*(changed(told, path, value) for value in NASTY), dropped(told, path)):
            for arguments in (
                ["predict", "run", "pairs.tsv", "--max-new-tokens", "1"],
                ["train", "--resume", "run", "--steps", "3"],
            ):
                shutil.copytree(good, tmp_path / "run", dirs_exist_ok=True)
                shutil.copy(begun / "pairs.tsv", tmp_path / "pairs.tsv")
                for folder in (tmp_path / "run" / "checkpoints").iterdir():
                    (folder / "trainer.json").write_text(json.dumps(made))
                    sums = checkpoint.sha256_sums(folder, ("model.safetensors", "trainer.safetensors", "trainer.json"))
                    (folder / "SHA256SUMS").write_text(sums)
                outcome(tmp_path, *arguments)
                shutil.rmtree(tmp_path / "run")


def test_metrics_beyond_all_numbers(home):
    path = home / "run" / "metrics.jsonl"
    try:
        path.write_text(f'{{"step": {10**400}, "final": {{"loss": {10**400}, "bleu": -{10**400}}}}}\n')
        assert outcome(home, "show", "run") == ""
    finally:
        path.unlink()


def test_names_that_no_file_can_have(home):
    name = "x" * 5000
    for arguments in (
        ["show", name],
        ["predict", name],
        ["evaluate", name],
        ["convert", name, "out"],
        ["profile", name],
    ):
        assert outcome(home, *arguments).startswith("regard: ")
