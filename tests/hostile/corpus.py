"""Good folders and files, and what a hostile hand makes of them: every value replaced by every nasty one, entries
dropped, files emptied, cut, flipped, swapped. Each case is run through the command line in this process and must end in
an answer or in one sentence."""

import copy
import json
import math
import os
import re
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import typer

import regard
from regard.cli import main
from regard.convert import convert
from regard.data import Tokenizer
from regard.data.masks import with_special_tokens

program = sys.modules["regard.cli.app"]  # the name stands for the object in it, too
COMMANDS = typer.main.get_command(program.app)  # made once: typer makes them for every call
LIMIT = 30  # seconds after which a case counts as endless: a net, no measure
TEXTS = ["the cat sat on the mat", "a dog", "on the mat sat a dog and a cat", "cat"]

ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\u202ex[/x]\r"  # what moves the cursor, hides text, or is markup
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
NASTY: list[Any] = [None, True, "x", -3, 0, 10**9, 10**30, 1.5, math.nan, [], [None, "a"], {"a": [None]}, ESCAPES]
NASTY_TOML: list[Any] = [True, "x", -3, 10**9, math.nan, [], {"a": [1]}, ESCAPES]

FAMILIES = {  # recipe -> its size, and what makes it tiny
    "gpt2": ("tiny", ["model.width=12", "model.heads=3", "model.depth=1", "model.embed.position.length=16"]),
    "llama": ("tiny", ["model.width=16", "model.heads=2", "model.depth=1", "model.layer.0.mixer.kv_heads=1",
                       "model.layer.0.feedforward.hidden=20"]),
    "mistral": ("tiny", ["model.width=16", "model.heads=2", "model.depth=1", "model.layer.0.mixer.kv_heads=1",
                         "model.layer.0.feedforward.hidden=20"]),
    "bert": ("tiny", ["model.width=12", "model.heads=3", "model.depth=1", "model.layer.0.feedforward.hidden=20",
                      "model.head.tokens.hidden=12", "model.head.pair.hidden=12", "model.embed.position.length=16"]),
    "t5": ("tiny", ["model.width=12", "model.heads=3", "model.encoder.depth=1", "model.decoder.depth=1"]),
    "vit": ("tiny", ["model.width=12", "model.heads=3", "model.depth=1", "model.embed.image=8"]),
    "bart": ("tiny", ["model.width=12", "model.encoder.heads=3", "model.decoder.heads=3", "model.encoder.depth=1",
                      "model.decoder.depth=1", "model.embed.position.length=16"]),
    "clip": ("tiny", ["model.image.depth=1", "model.text.depth=1"]),
}  # fmt: skip


def hugging_face_folder(recipe: str, folder: Path) -> Path:
    """A tiny model in the Hugging Face layout, made without transformers."""
    run, out = folder / "made", folder / recipe
    size, overrides = FAMILIES[recipe]
    torch.manual_seed(3)
    model = regard.build(recipe, size, 31, overrides)
    regard.save(model, run)
    (run / "run.json").write_text(json.dumps({"job": {"recipe": recipe}}))
    convert(run, out)
    shutil.rmtree(run)
    return out


def text_run(folder: Path) -> Path:
    """A finished language model, as regard itself leaves it."""
    words = with_special_tokens(Tokenizer.train("words", TEXTS))
    torch.manual_seed(5)
    small = ["model.width=12", "model.heads=3", "model.depth=1", "model.layer.0.feedforward.hidden=20"]
    model = regard.build("transformer-decoder", "tiny", words.size, small)
    regard.save(model, folder)
    words.save(folder / "tokenizer.json")
    told = {
        "tokenizers": [words.hash()] * 2,
        "documents": True,
        "marks": {"start": 2, "end": 3, "pad": 0, "forced": None, "never": [1], "ends": [3]},
        "job": {"recipe": "transformer-decoder", "run": "x", "data": None, "source": None, "target": None, "dev": None,
                "test": None, "columns": None, "bad_lines": "refuse"},
        "parameters": 100,
        "sessions": [],
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(told, indent=1))
    (folder / "texts.txt").write_text("the cat\na dog\n")
    return folder


# Mutations


def places(table: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value inside a table, tables and lists included."""
    for key, value in table.items() if isinstance(table, dict) else enumerate(table):
        yield (*path, key)
        if isinstance(value, dict | list) and len(value) < 40:
            yield from places(value, (*path, key))


def changed(table: Any, path: tuple, value: Any) -> Any:
    """A copy with another value at this path."""
    table = copy.deepcopy(table)
    here = table
    for key in path[:-1]:
        here = here[key]
    here[path[-1]] = copy.deepcopy(value)
    return table


def dropped(table: Any, path: tuple) -> Any:
    table = copy.deepcopy(table)
    here = table
    for key in path[:-1]:
        here = here[key]
    del here[path[-1]]
    return table


def damaged(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Damage that any file may have."""
    yield "emptied", b""
    for part in (1, len(data) // 3, len(data) - 1):
        yield f"cut to {part}", data[:part]
    for at in range(0, len(data), max(len(data) // 12, 1)):
        yield f"flipped at {at}", data[:at] + bytes([data[at] ^ 0x5A]) + data[at + 1 :]
    yield "zeros", bytes(len(data))
    yield "ones", b"\xff" * min(len(data), 1000)
    yield "twice", data * 2
    yield "deep JSON", b"[" * 100_000
    yield "deep table", b'{"a":' * 100_000
    yield "long number", b'{"vocab": ' + b"1" * 100_000 + b"}"
    yield "a picture", b"\x89PNG\r\n\x1a\n" + bytes(40)


# Running


_allowed: list[Path] = []
_outside: list[str] = []
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _watch(event: str, given: tuple) -> None:
    """Keep a note of whatever is written outside of the folder of the case."""
    if not _allowed:
        return
    if event == "open":
        path, mode, flags = given
        writes = (flags or 0) & WRITES or (isinstance(mode, str) and set(mode) & set("wax+"))
        paths = [path] if writes else []
    elif event in ("os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate"):
        paths = [given[0]]
    elif event in ("os.rename", "os.link", "os.symlink", "shutil.copyfile", "shutil.move"):
        paths = list(given[1:2])
    else:
        return
    for path in paths:
        if isinstance(path, str | bytes | os.PathLike):
            whole = Path(os.path.realpath(os.fsdecode(path)))
            nameless = str(whole) == os.path.realpath(tempfile.gettempdir())  # a file that goes with its process
            nameless |= whole.name.startswith("torchinductor_")  # torch's own, empty
            if not nameless and not any(whole.is_relative_to(folder) for folder in (*_allowed, Path("/dev"))):
                _outside.append(f"{event} {whole}")


sys.addaudithook(_watch)


@contextmanager
def bounded(folder: Path) -> Iterator[None]:
    """Nothing is written outside of the folder, and nothing lasts for ever."""

    def stop(number: int, frame: Any) -> None:
        raise AssertionError(f"no end after {LIMIT} seconds")

    _outside.clear()
    _allowed[:] = [folder.resolve()]
    before, there = signal.signal(signal.SIGALRM, stop), Path.cwd()
    os.chdir(folder)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        os.chdir(there)
        _allowed.clear()
    assert not _outside, _outside


def outcome(folder: Path, *arguments: str) -> str:
    """What a command says on stderr: nothing when it worked, one sentence when it refused. Anything else fails."""
    out, err = StringIO(), StringIO()
    with bounded(folder), redirect_stdout(out), redirect_stderr(err), mock.patch.object(program, "app", COMMANDS):
        code = main([str(one) for one in arguments])
    told = err.getvalue()
    assert code in (0, 2), (code, told)
    for text in (told, "" if arguments[0] == "predict" else out.getvalue()):  # answers go to a file as they are
        assert not CONTROL.search(text), repr(text)
    if code == 2:
        sentences = [line for line in told.splitlines() if line.startswith("regard: ")]
        assert len(sentences) == 1, told
        assert len(sentences[0]) < 2000, told[:3000]
        assert "Traceback" not in told
    return told if code else ""


def wav(samples: bytes, announced: int | None = None, rate: int = 16000, channels: int = 1, bits: int = 16) -> bytes:
    """A WAV file of PCM samples. announced: the size of the samples that its header states."""
    size = len(samples) if announced is None else announced
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * channels * bits // 8, channels * bits // 8, bits)
    body = b"WAVEfmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", size) + samples
    return b"RIFF" + struct.pack("<I", min(len(body) if announced is None else announced, 2**32 - 1)) + body
