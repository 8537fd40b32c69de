"""Data files from a stranger: tables, archives, pictures and sounds that announce more than they hold, or hold more
than anybody can take."""

import gzip
import io
import json
import struct
import zipfile
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from regard.convert import convert
from regard.core import UserError
from regard.data import forms
from regard.data.graph import open_graph
from regard.data.images import open_image
from regard.data.pictures import open_images
from regard.data.sound import read_sound

from .corpus import damaged, hugging_face_folder, outcome, text_run, wav

FUZZ = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
LINES = ["the cat sat", "a dog on the mat"]


def parquet():
    file = io.BytesIO()
    pq.write_table(pa.table({"text": LINES}), file)
    return file.getvalue()


def arrays(**held):
    file = io.BytesIO()
    np.savez_compressed(file, **held)
    return file.getvalue()


def graph():
    edges, labels = np.array([[0, 1], [1, 2]]), np.array([0, 1, 1])
    return arrays(edges=edges, labels=labels, features=np.eye(3, dtype=np.float32), train_idx=np.array([0, 1]))


def picture(kind="PNG"):
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 30, 5)).save(file, kind)
    return file.getvalue()


TEXTS = {
    "a.txt": "\n".join(LINES).encode(),
    "a.tsv": "".join(f"{line}\tx\n" for line in LINES).encode(),
    "a.csv": "".join(f'"{line}",x\n' for line in LINES).encode(),
    "a.jsonl": "".join(json.dumps({"text": line}) + "\n" for line in LINES).encode(),
    "a.parquet": parquet(),
    "a.txt.gz": gzip.compress("\n".join(LINES).encode()),
    "a.parquet.gz": gzip.compress(parquet()),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a language model and one that labels pictures."""
    home = tmp_path_factory.mktemp("home")
    text_run(home / "run")
    convert(hugging_face_folder("vit", home), home / "eye")
    return home


@pytest.mark.parametrize("name", TEXTS)
def test_tables_damaged(home, name):
    columns = ["--columns", "0"] if name in ("a.tsv", "a.csv") else []
    (home / name).write_bytes(TEXTS[name])
    assert outcome(home, "evaluate", "run", "--data", name, "--metric", "loss", *columns) == ""
    for _, data in damaged(TEXTS[name]):
        (home / name).write_bytes(data)
        outcome(home, "evaluate", "run", "--data", name, "--metric", "loss", *columns)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM"])
def test_pictures_damaged(home, kind):
    (home / "a.png").write_bytes(picture(kind))
    assert outcome(home, "predict", "eye", "a.png") == ""
    for _, data in damaged(picture(kind)):
        (home / "a.png").write_bytes(data)
        outcome(home, "predict", "eye", "a.png")


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(side):
    """A PNG of so many black pixels a side, a few bytes long."""
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [10_000, 100_000, 2**31 - 1])
def test_a_picture_that_is_a_bomb(home, side):
    (home / "a.png").write_bytes(bomb(side))
    told = outcome(home, "predict", "eye", "a.png")
    assert "a.png cannot be read as a picture: " in told
    assert f"{side**2}" in told or "invalid" in told.lower() or "too large" in told.lower()


def test_a_picture_too_narrow(home, tmp_path):
    from regard.data.images import ImageProcessor

    Image.new("L", (1, 30_000)).save(tmp_path / "a.png")
    with pytest.raises(UserError, match=r"a picture of 1 x 30,000 pixels is too narrow to be resized"):
        ImageProcessor(10_000).resize_and_crop(open_image(tmp_path / "a.png"))
    with pytest.raises(UserError, match=r"size is height and width in pixels, up to 16,384, not 1000000000"):
        ImageProcessor(10**9)


@given(st.data())
@FUZZ
def test_sounds_damaged(tmp_path, data):
    good = wav(bytes(range(200)))
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(bad)))
        piece = data.draw(st.binary(max_size=4) | st.sampled_from([b"\xff" * 4, b"\0" * 4, b"data", b"fmt "]))
        bad[at : at + len(piece)] = piece
    path = tmp_path / "a.wav"
    path.write_bytes(bytes(bad))
    refused = ""
    try:
        assert len(read_sound(path))
    except UserError as error:
        refused = str(error)
    assert "\n" not in refused


def test_a_sound_that_announces_four_gigabytes(tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(wav(bytes(100), announced=2**32 - 1))
    with pytest.raises(UserError, match=r"a.wav announces 4,294,967,295 bytes of samples, and holds 100: it was cut"):
        read_sound(path)


def test_a_line_without_an_end(home, monkeypatch):
    """Zeros are zipped a thousand times smaller: nobody reads on until they end."""
    monkeypatch.setattr(forms, "MAX_LINE_BYTES", 1 << 22)
    (home / "zeros.tsv.gz").write_bytes(gzip.compress(bytes(1 << 24)))
    told = outcome(home, "evaluate", "run", "--data", "zeros.tsv.gz", "--metric", "loss", "--columns", "0")
    assert "zeros.tsv.gz holds a line of more than 4,194,304 bytes, which is no text" in told


def test_a_zipped_table_that_is_a_bomb(home):
    (home / "zeros.parquet.gz").write_bytes(gzip.compress(b"PAR1" + bytes(1 << 24)))
    told = outcome(home, "evaluate", "run", "--data", "zeros.parquet.gz", "--metric", "loss")
    assert "zeros.parquet.gz becomes more than 100 times larger unzipped" in told


@pytest.mark.parametrize("opened", [open_graph, open_images])
def test_arrays_damaged(tmp_path, opened):
    path = tmp_path / "a.npz"
    good = graph() if opened is open_graph else arrays(images=np.zeros((9, 2, 2), np.uint8), labels=np.arange(9) % 2)
    path.write_bytes(good)
    assert opened(path)
    plain = io.BytesIO()
    np.save(plain, np.ones(3))
    for data in (*(bad for _, bad in damaged(good)), plain.getvalue()):
        path.write_bytes(data)
        refused = ""
        try:
            opened(path)
        except UserError as error:
            refused = str(error)
        assert "\n" not in refused


def header(shape):
    """An .npy file that announces an array of this shape, and holds eight bytes."""
    text = repr({"descr": "<f8", "fortran_order": False, "shape": shape}).encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(8)


@pytest.mark.parametrize("shape", [(10**12,), (10**6, 10**9), (2**62, 8), (10**30,), (-5,)])
def test_arrays_that_announce_more_than_they_hold(home, shape):
    with zipfile.ZipFile(home / "a.npz", "w") as held:
        held.writestr("features.npy", header(shape))
    with pytest.raises(UserError, match=r"a.npz cannot be read"):
        open_graph(home / "a.npz")
    (home / "a.npy").write_bytes(header(shape))
    recipe = (home / "run" / "recipe.toml").read_text()
    assert 'pattern = "causal"' in recipe
    (home / "mine.toml").write_text(recipe.replace('pattern = "causal"', "pattern = \"causal & matrix('a.npy')\""))
    assert "no matrix can be read from 'a.npy'" in outcome(home, "show", "./mine.toml")


def test_arrays_that_no_memory_could_hold(tmp_path, monkeypatch):
    from regard import memory

    (tmp_path / "a.npz").write_bytes(arrays(features=np.zeros((1000, 1000))))
    monkeypatch.setattr(memory, "machine_memory", lambda: 10**6)
    with pytest.raises(UserError, match=r"a.npz, unzipped, takes 8.0 MB of memory, and this machine has 1.0 MB"):
        open_graph(tmp_path / "a.npz")
