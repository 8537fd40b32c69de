"""Reading WAV files of all kinds, resampling, and log-mel frames equal to Whisper's."""

import io
import struct
import wave
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import WhisperFeatureExtractor

from regard.core import UserError
from regard.data.mel import SAMPLE_RATE, log_mel, mel_filters
from regard.data.sound import read_sound, read_wav, resample

SHARED = Path(__file__).parents[3] / "shared" / "data"
RECORDINGS = ["0_george_0.wav", "3_jackson_11.wav", "7_theo_23.wav"] if (SHARED / "fsdd").is_dir() else []


def noise(count: int, seed: int = 0) -> torch.Tensor:
    return 0.2 * torch.randn(count, generator=torch.Generator().manual_seed(seed))


def chirp(count: int) -> torch.Tensor:
    """Return a chirp that rises and fades, then silence."""
    at = torch.arange(count) / SAMPLE_RATE
    return torch.sin(2 * torch.pi * (80 + 900 * at) * at) * torch.exp(-at) * (at < 2)


def recording(name: str) -> torch.Tensor:
    with (
        zipfile.ZipFile(SHARED / "fsdd" / "recordings.zip") as archive,
        wave.open(io.BytesIO(archive.read(name))) as one,
    ):
        samples = np.frombuffer(one.readframes(one.getnframes()), "<i2")
        return resample(torch.from_numpy(samples / 32768).float(), one.getframerate())


SOUNDS = {
    "noise": lambda: noise(30 * SAMPLE_RATE),
    "chirp": lambda: chirp(3 * SAMPLE_RATE),
    "silence": lambda: torch.zeros(999),
    **{name: lambda name=name: recording(name) for name in RECORDINGS},
}


@pytest.mark.parametrize("name", SOUNDS)
@pytest.mark.parametrize("bands", [80, 128])
def test_frames_are_whispers(name, bands):
    sound = SOUNDS[name]()
    theirs = WhisperFeatureExtractor(feature_size=bands)(sound.numpy(), sampling_rate=SAMPLE_RATE, return_tensors="pt")
    ours = log_mel(F.pad(sound, (0, 30 * SAMPLE_RATE - len(sound))), bands)
    assert ours.shape == (3000, bands)
    assert ours.dtype == torch.float32
    assert float((ours - theirs.input_features[0].T).abs().max()) < 1e-5


@pytest.mark.parametrize("bands", [80, 128])
def test_filters_are_whispers(bands):
    want = torch.from_numpy(WhisperFeatureExtractor(feature_size=bands).mel_filters.T).float()
    assert torch.allclose(mel_filters(bands), want, rtol=1e-5, atol=1e-8)
    assert float(want.max()) > 0.02


def test_long_sounds_are_worked_on_in_parts():
    """Computing in chunks changes nothing: the last frames of a long sound equal those of its end alone."""
    sound = noise(65 * SAMPLE_RATE, 3)
    whole, end = log_mel(sound, 7), log_mel(sound[60 * SAMPLE_RATE - 1600 :], 7)
    assert whole.shape == (6500, 7)
    assert torch.allclose(whole[6000:], end[10:], atol=1e-5)
    assert log_mel(noise(170), 5).shape == (1, 5)


def riff(
    kind: int, channels: int, rate: int, bits: int, data: bytes, more: bytes = b"", size: int | None = None
) -> bytes:
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * channels * bits // 8, channels * bits // 8, bits) + more
    body = b"WAVE" + b"odd \x03\0\0\0abc\0" + b"fmt " + struct.pack("<I", len(form)) + form
    body += b"data" + struct.pack("<I", len(data) if size is None else size) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def packed(numbers: np.ndarray, bits: int) -> bytes:
    whole = np.round(numbers * 2 ** (bits - 1)).astype("<i4")
    if bits == 8:
        return (whole + 128).astype(np.uint8).tobytes()
    return whole.view(np.uint8).reshape(-1, 4)[:, : bits // 8].tobytes()


NUMBERS = np.array([0.0, 0.5, -0.25, -1.0, 0.875, 0.0625])  # three of two channels, or six of one


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("bits", [8, 16, 24, 32])
def test_whole_numbers(tmp_path, bits, channels):
    path = tmp_path / "one.wav"
    path.write_bytes(riff(1, channels, 8000, bits, packed(NUMBERS, bits)))
    samples, rate = read_wav(path)
    assert rate == 8000
    assert samples.tolist() == pytest.approx(NUMBERS.reshape(-1, channels).mean(1).tolist(), abs=1e-7)


@pytest.mark.parametrize("bits", [32, 64])
def test_floating_numbers(tmp_path, bits):
    path = tmp_path / "one.wav"
    path.write_bytes(riff(3, 2, 44100, bits, NUMBERS.astype(f"<f{bits // 8}").tobytes()))
    assert read_wav(path)[0].tolist() == pytest.approx(NUMBERS.reshape(-1, 2).mean(1).tolist())
    extended = struct.pack("<HHIH", 22, bits, 3, 3) + bytes(14)  # the kind stands at the end of a longer form
    path.write_bytes(riff(0xFFFE, 1, 44100, bits, NUMBERS.astype(f"<f{bits // 8}").tobytes(), extended))
    assert read_wav(path)[0].tolist() == pytest.approx(NUMBERS.tolist())


def test_what_the_standard_library_writes(tmp_path):
    path, numbers = tmp_path / "one.wav", (noise(500) * 2**15).short().numpy()
    with wave.open(str(path), "wb") as out:
        out.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        out.writeframes(numbers.astype("<i2").tobytes())
    assert torch.equal(read_sound(path), torch.from_numpy(numbers).float() / 2**15)


@pytest.mark.parametrize("size", [0xFFFFFFFF, 4000, 13])
def test_a_file_that_announces_more_than_it_holds_is_refused(tmp_path, size):
    path = tmp_path / "one.wav"
    path.write_bytes(riff(1, 2, SAMPLE_RATE, 16, packed(NUMBERS, 16), size=size))
    with pytest.raises(UserError, match=rf"announces {size:,} bytes of samples, and holds 12: it was cut off"):
        read_wav(path)


@pytest.mark.parametrize("old", [8000, 11025, 22050, 44100, 48000, 15990])
def test_other_rates(old):
    """A resampled tone keeps its frequency, length and amplitude."""
    for hertz in (90, 1000, 3400):
        at = torch.arange(old // 4, dtype=torch.float64) / old
        found = resample(torch.sin(2 * torch.pi * hertz * at).float(), old)
        assert len(found) == -(-len(at) * SAMPLE_RATE // old)
        want = torch.sin(2 * torch.pi * hertz * torch.arange(len(found), dtype=torch.float64) / SAMPLE_RATE).float()
        assert float((found - want)[400:-400].abs().max()) < 1e-3


def test_what_is_too_high_for_the_new_rate_is_gone():
    at = torch.arange(24000) / 48000
    assert float(resample(torch.sin(2 * torch.pi * 9500 * at), 48000)[400:-400].abs().max()) < 3e-3
    assert float(resample(torch.ones(4000), 44100)[400:-400].sub(1).abs().max()) < 1e-5
    same = noise(50)
    assert resample(same, SAMPLE_RATE) is same


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"fLaC" + bytes(40), "is a FLAC file, and only WAV is read: convert it, for example by `ffmpeg -i talk.x"),
        (b"ID3" + bytes(40), "is an MP3 file"),
        (b"\xff\xfb" + bytes(40), "is an MP3 file"),
        (b"\0\0\0\x18ftypM4A " + bytes(40), "is an MP4 file"),
        (b"OggS" + bytes(40), "is an Ogg file"),
        (b"", "is empty"),
        (b"hello", "is not a WAV file"),
        (b"RIFF\0\0\0\0WAVE", "without a description of its samples"),
        (riff(1, 1, SAMPLE_RATE, 16, b"")[:-8], "without samples"),
        (riff(1, 1, SAMPLE_RATE, 16, b""), "holds no sound"),
        (riff(7, 1, SAMPLE_RATE, 8, bytes(9)), "not read (kind 7, 8 bits)"),
        (riff(1, 0, SAMPLE_RATE, 16, bytes(8)), "0 channels"),
        (riff(1, 1, 1, 16, bytes(8)), "1 channels and 1 samples a second"),
        (riff(1, 1, 2**31 - 1, 8, bytes(8)), "2147483647 samples a second"),
        (riff(3, 1, SAMPLE_RATE, 32, struct.pack("<ff", 0.5, float("nan"))), "samples that are not numbers"),
    ],
)
def test_bad_files(tmp_path, content, message):
    path = tmp_path / "talk.x"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_wav(path)
    assert message in str(error.value)


def test_no_file(tmp_path):
    with pytest.raises(UserError, match=r"gone.wav cannot be read: No such file"):
        read_sound(tmp_path / "gone.wav")
    with pytest.raises(UserError, match="is a folder"):
        read_sound(tmp_path)


@pytest.mark.parametrize("sound", [torch.zeros(2, 900), torch.zeros(900, dtype=torch.long), torch.zeros(159)])
def test_what_is_no_sound(sound):
    with pytest.raises(UserError, match=r"one row of numbers|shorter than a frame"):
        log_mel(sound)
