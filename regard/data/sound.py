"""Read WAV files, with integer or floating-point samples, any channels and any rate, as mono samples at 16 kHz.

Other rates are resampled with a windowed sinc, a low-pass filter at half of the lower rate.

    y(t) = sum over n of  x(n) c sinc(c (t - n)) w(t - n)         c = min(1, new / old), w: a Kaiser window
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import UserError
from regard.errors import short

from .mel import SAMPLE_RATE

# Zero crossings of the sinc on either side; the share of the band that passes; the shape of the window.
CROSSINGS, ROLLOFF, BETA = 64, 0.95, 9.0
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE  # format codes of WAV
MIN_RATE, MAX_RATE = 1000, 1_000_000  # samples per second; a file with another rate is damaged
OTHER_FORMATS = {  # the first bytes of other formats
    b"fLaC": "FLAC", b"OggS": "Ogg", b"ID3": "MP3", b"\xff\xfb": "MP3", b"\xff\xf3": "MP3", b"\xff\xf2": "MP3",
    b"FORM": "AIFF", b".snd": "AU", b"caff": "CAF", b"RF64": "RF64", b"RIFX": "RIFX", b"\x1aE\xdf\xa3": "WebM",
}  # fmt: skip


class WavFormat(NamedTuple):
    """The format of the samples of a WAV file."""

    kind: int
    channels: int
    rate: int
    bits: int


def read_sound(path: str | Path) -> Tensor:
    """Return the mono samples of a file, (samples,) at 16 kHz, between -1 and 1."""
    samples, rate = read_wav(path)
    return resample(samples, rate)


def read_wav(path: str | Path) -> tuple[Tensor, int]:
    """Return the mean of the channels, (samples,), and the sample rate."""
    path, name = Path(path), short(path)
    try:
        data = path.read_bytes()
    except IsADirectoryError:
        raise UserError(f"{name} is a folder, not a sound file") from None
    except OSError as error:
        raise UserError(f"the sound file {name} cannot be read: {error.strerror}") from None
    if not data:
        raise UserError(f"{name} is empty")
    form, samples = _chunks(data, path)
    size = form.bits // 8
    samples = samples[: len(samples) // (size * form.channels) * size * form.channels]
    if not len(samples):
        raise UserError(f"{name} holds no sound")
    numbers = _numbers(samples, form).reshape(-1, form.channels).mean(1, dtype=np.float32)
    if not np.isfinite(numbers).all():
        raise UserError(f"{name} holds samples that are not numbers")
    return torch.from_numpy(numbers), form.rate


def _chunks(data: bytes, path: Path) -> tuple[WavFormat, bytes]:
    """Return the format and the bytes of the samples of a RIFF file."""
    name = short(path)
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        kind = next((kind for begin, kind in OTHER_FORMATS.items() if data.startswith(begin)), None)
        kind = "MP4" if data[4:8] == b"ftyp" else kind
        what = f"is {'an' if kind[0] in 'AMOR' else 'a'} {kind} file" if kind else "is not a WAV file"
        raise UserError(
            f"{name} {what}, and only WAV is read: convert it, for example by "
            f"`ffmpeg -i {path.name} -ar 16000 -ac 1 {path.stem}{'-16k' if path.suffix == '.wav' else ''}.wav`"
        )
    form, at = None, 12
    while at + 8 <= len(data):
        tag, size = data[at : at + 4], struct.unpack_from("<I", data, at + 4)[0]
        body = data[at + 8 : at + 8 + size]
        if tag == b"fmt ":
            form = _wav_format(body, name)
        elif tag == b"data":
            if form is None:
                break
            if len(body) < size:
                raise UserError(
                    f"{name} announces {size:,} bytes of samples, and holds {len(body):,}: it was cut off, or written "
                    f"as a stream; write it anew, for example by `ffmpeg -i {path.name} {path.stem}-whole.wav`"
                )
            return form, body
        at += 8 + size + size % 2
    raise UserError(f"{name} is a WAV file without {'samples' if form else 'a description of its samples'}")


def _wav_format(body: bytes, name: str) -> WavFormat:
    if len(body) < 16:
        raise UserError(f"{name} is a WAV file without a description of its samples")
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", body)
    if kind == EXTENSIBLE and len(body) >= 26:
        kind = struct.unpack_from("<H", body, 24)[0]
    known = {PCM: (8, 16, 24, 32), FLOAT: (32, 64)}.get(kind, ())
    if bits not in known:
        raise UserError(
            f"{name} keeps its samples in a way that is not read (kind {kind}, {bits} bits): convert it to plain PCM, "
            f"for example by `ffmpeg -i OLD.wav -c:a pcm_s16le NEW.wav`"
        )
    if not channels or not MIN_RATE <= rate <= MAX_RATE:
        raise UserError(f"{name} says that it has {channels} channels and {rate} samples a second")
    return WavFormat(kind, channels, rate, bits)


def _numbers(samples: bytes, form: WavFormat) -> np.ndarray:
    """Return the samples as floats between -1 and 1, (samples * channels,)."""
    if form.kind == FLOAT:
        return np.frombuffer(samples, f"<f{form.bits // 8}").astype(np.float32)
    if form.bits == 8:
        return (np.frombuffer(samples, np.uint8).astype(np.float32) - 128) / 128
    if form.bits == 24:
        low = np.zeros((len(samples) // 3, 4), np.uint8)  # becomes the upper three bytes of four
        low[:, 1:] = np.frombuffer(samples, np.uint8).reshape(-1, 3)
        return (low.reshape(-1).view("<i4") / 2**31).astype(np.float32)
    return (np.frombuffer(samples, f"<i{form.bits // 8}") / 2 ** (form.bits - 1)).astype(np.float32)


def resample(samples: Tensor, old: int, new: int = SAMPLE_RATE) -> Tensor:
    """Resample (n,) from the rate `old` to `new`: (ceil(n * new / old),)."""
    if old == new:
        return samples
    common = math.gcd(old, new)
    down, up = old // common, new // common  # every `down` input samples become `up` output samples
    cutoff = ROLLOFF * min(1.0, up / down)
    reach = math.ceil(CROSSINGS / cutoff)
    count = -(-len(samples) * up // down)
    padded = F.pad(samples.float(), (reach, reach + down + 1))
    offsets = torch.arange(-reach, reach + 1, dtype=torch.float64)
    out = samples.new_zeros(-(-count // up), up, dtype=torch.float32)
    for phase in range(min(up, count)):  # outputs at the same phase between inputs have the same weights
        whole, part = divmod(phase * down, up)
        away = (offsets - part / up) * cutoff
        window = torch.special.i0(BETA * (1 - (away / CROSSINGS).square()).clamp(min=0).sqrt())
        weights = torch.sinc(away) * window * (away.abs() <= CROSSINGS)
        weights = (weights / weights.sum()).float()  # a constant signal is preserved
        near = padded[whole:].unfold(0, len(weights), down)[: len(out)]
        out[: len(near), phase] = near @ weights
    return out.flatten()[:count]
