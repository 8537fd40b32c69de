"""Transcribe recordings of any length, as Whisper does. An encoder of frames and a decoder learn from recordings with
their texts.

One window is transcribed at a time, greedily or by beam search; an answer that repeats itself or is unlikely is sampled
again at increasing temperatures. With timestamps, the next window begins at the last of them.

    run = regard.load("runs/whisper")
    run.predict(["talk.wav"])[0][0].segments

Radford et al. 2022, arXiv:2212.04356, section 4.5.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import metrics as measures
from regard.core import Memory, Model, UserError, select
from regard.data import Corpus, CorpusSplit, first_epoch
from regard.data.mel import HOP, SAMPLE_RATE, log_mel
from regard.data.recordings import RecordingBatches, folder_of, prepare_sounds, teacher_forced_after
from regard.data.sound import read_sound
from regard.data.tokenizer import Tokenizer
from regard.decode import DecodeConfig, Request, search
from regard.parts.objectives.next_token import NextToken
from regard.runs.checkpoint import write_atomically

from .dev import Dev, group_references
from .reader import Reader
from .speech import GENERATION_CONFIG, SpeechTokens
from .task import DEV_TOKENS, Say, Task, Tick, no_progress, say_nothing

BATCH_SIZE = 8  # recordings that are transcribed at a time
FRAME_SECONDS = 0.01  # of a frame; timestamps are in steps of two frames
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MAX_COMPRESSION = 2.4  # text that zlib compresses by more than this factor repeats itself
MIN_LOGPROB = -1.0  # log p per token
MAX_NO_SPEECH = 0.6  # the probability of "no speech" above which an unlikely answer is dropped


class Segment(NamedTuple):
    """A piece of a transcript, with its times in seconds."""

    start: float
    end: float
    text: str
    logprob: float  # per token, of its window
    silence: float  # the probability of "no speech" in its window
    temperature: float


class Transcript(NamedTuple):
    """The transcript of a recording."""

    text: str
    score: float  # log p per token
    logprob: float
    tokens: list[str]
    ended: bool  # every window by the end token, not by the length limit
    cut: bool
    language: str | None
    segments: list[Segment]


class Answer(NamedTuple):
    """The answer to one window."""

    tokens: list[int]
    logprob: float
    ended: bool
    temperature: float
    text: str

    @property
    def mean(self) -> float:
        return self.logprob / (len(self.tokens) + 1)

    def should_retry(self, silence: float) -> bool:
        """Return whether the window should be decoded again at a higher temperature."""
        said = self.text.encode()
        repeats = len(said) / len(zlib.compress(said)) > MAX_COMPRESSION
        return not self.is_silent(silence) and (repeats or self.mean < MIN_LOGPROB)

    def is_silent(self, silence: float) -> bool:
        return silence > MAX_NO_SPEECH and self.mean < MIN_LOGPROB


@dataclass
class Recording:
    """A recording, and how far it has been transcribed."""

    frames: Tensor  # (frames and a window of silence, bands)
    length: int  # frames
    timed: bool
    at: int = 0
    language: int | None = None
    segments: list[Segment] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    said: list[int] = field(default_factory=list)


class Transcriber(Reader):
    """Transcribes recordings.

    target:     the tokenizer of the texts.
    language:   of the recording, such as en; None: it is detected in the first window.
    task:       transcribe, or translate into English.
    timestamps: include timestamps in the text.
    """

    takes = "sounds"
    metrics = ("loss", "perplexity", "token_error", "exact")
    options = ("beam", "length_penalty", "temperature", "top_k", "top_p", "min_p", "seed", "max_new_tokens", "language",
               "task", "timestamps")  # fmt: skip

    def __init__(self, model: Model, source: Tokenizer, target: Tokenizer, folder: Path | None = None, note: str = ""):
        super().__init__(model, source, target, folder, note)
        self.load_speech_tokens(folder)
        self.language: str | None = None
        self.task, self.timestamps = "transcribe", False
        self.window = 2 * (model.source_limit or 1500)  # frames
        self.bands: int = model.source_embed.channels  # type: ignore[union-attr,assignment]

    def load_speech_tokens(self, folder: Path | None) -> None:
        """Read the special tokens from the files of a run folder."""
        self.speech = SpeechTokens.of(self.target, folder)

    @property
    def decoder_prefix(self) -> list[int]:
        """Return the token ids that precede every answer, without timestamps; the language is English by default."""
        language = self.speech.language(self.language or "en") if self.speech.languages else None
        return self.speech.prompt(language, self.task, False)

    @torch.no_grad()
    def evaluate(self, lines: Iterable[tuple[str, ...]], metrics: Sequence[str]) -> dict[str, Any]:
        """Return the result of regard.evaluate. lines: files of recordings, relative to their table, and their
        texts."""
        measures.check(metrics, ("loss", "perplexity", *measures.TEXT_METRICS))
        root = folder_of(lines) if isinstance(lines, CorpusSplit) else Path()
        rows = [(root / file, text) for file, text in lines]
        if not rows:
            raise UserError("there is nothing to evaluate: the data has no example")
        result: dict[str, Any] = {"scores": {}, "signatures": {}, "counts": {"recordings": len(rows)}, "seconds": {}}
        nll = count = 0
        for begin in range(0, len(rows), BATCH_SIZE) if {"loss", "perplexity"} & set(metrics) else ():
            files, texts = zip(*rows[begin : begin + BATCH_SIZE], strict=True)
            frames = torch.stack([self.read_recording(file).frames[: self.window] for file in files])
            ends = [[*ids, self.target.end] for ids in self.target.encode(texts)]
            batch = (
                teacher_forced_after(ends, self.decoder_prefix, self.target.pad)._replace(source=frames).to(self.device)
            )
            found = NextToken()(self.model, batch)
            nll, count = nll + float(found.nll), count + found.count
        if count:
            values = {"loss": nll / count, "perplexity": math.exp(min(nll / count, 700))}
            result["scores"] = {name: values[name] for name in metrics if name in values}
        if names := [name for name in metrics if name in measures.ANSWER_METRICS]:
            answers = [best[0].text for best in self.answers([file for file, _ in rows])]
            scores = measures.measure(names, answers, [[text] for _, text in rows])
            result["scores"] |= {score.name: score.value for score in scores}
            result["signatures"] = {score.name: score.signature for score in scores if score.signature}
        return result

    def read(self, files: Iterable[str | Path]) -> Iterator[Tensor]:
        """Yield the samples of each file, (n,) at 16 kHz."""
        return map(read_sound, files)

    def answers(  # type: ignore[override]
        self,
        texts: Iterable[str | Path | Tensor],
        config: DecodeConfig | None = None,
        attention: bool = False,
        read_ahead: int = BATCH_SIZE,
        tick: Callable[[int], None] = lambda done: None,
    ) -> Iterator[list[Transcript]]:
        """Yield the transcripts of recordings. texts: files, or samples at 16 kHz."""
        if isinstance(texts, str | Path | Tensor):
            raise UserError("recordings come in a list: for a single one, say [file]")
        if attention:
            raise UserError("a recording has no tokens that words could be aligned with: say timestamps")
        self.speech.check(self.task)
        if self.timestamps and self.speech.zero is None:
            raise UserError("this model has no timestamps: leave out --timestamps")
        language = None if self.language is None else self.speech.language(self.language)
        config, source = config or self.config, iter(texts)
        while some := list(islice(source, max(1, min(read_ahead, BATCH_SIZE)))):
            heard = [self.read_recording(one, language) for one in some]
            while left := [one for one in heard if one.at < one.length]:
                self._transcribe_window([one for one in left if one.timed == left[0].timed], config)
            yield from ([self._transcript(one)] for one in heard)
            tick(len(some))

    def read_recording(self, sound: str | Path | Tensor, language: int | None = None) -> Recording:
        """Return a recording as log-mel frames. One that is longer than a window needs timestamps to advance by."""
        samples = sound if isinstance(sound, Tensor) else read_sound(sound)
        length = -(-len(samples) // HOP)
        frames = log_mel(F.pad(samples, (0, self.window * HOP)), self.bands)
        timed = self.speech.zero is not None and (self.timestamps or length > self.window)
        return Recording(frames, length, timed, language=language)

    @torch.no_grad()
    def _transcribe_window(self, some: list[Recording], config: DecodeConfig) -> None:
        """Transcribe the next window of each recording; all have timestamps, or none."""
        like = next(self.model.parameters())
        frames = torch.stack([one.frames[one.at : one.at + self.window] for one in some]).to(like)
        memory, speech = self.model.encode(frames), self.speech
        start = torch.full((len(some), 1), speech.start, device=self.device)
        first = self.model(start, memory=memory)[:, 0].float()
        for one, scores in zip(some, first, strict=True):
            if one.language is None and speech.languages:
                one.language = max(speech.languages.values(), key=scores.tolist().__getitem__)
        silence = [0.0] * len(some) if speech.no_speech is None else first.softmax(-1)[:, speech.no_speech].tolist()
        for one, answer, quiet in zip(some, self._answer(some, memory, silence, config), silence, strict=True):
            self._append_answer(one, answer, quiet)

    def _answer(
        self, some: list[Recording], memory: Memory, silence: Sequence[float], config: DecodeConfig
    ) -> list[Answer]:
        """Return the answers to a window of each recording, decoded again at higher temperatures where they are
        poor."""
        prompts = [self.speech.prompt(one.language, self.task, one.timed) for one in some]
        prefix = torch.tensor(prompts, device=self.device)
        limit = self.model.limit
        max_new_tokens = config.max_new_tokens or (limit // 2 if limit else 200)
        max_new_tokens = max_new_tokens if limit is None else min(max_new_tokens, limit - prefix.shape[1] + 1)
        rule, found = self.speech.rule(some[0].timed), {}
        left = list(range(len(some)))
        retries = TEMPERATURES if self.speech.zero is not None else TEMPERATURES[:1]
        for temperature in (config.temperature,) if config.temperature else retries:
            how = (
                replace(config, temperature=temperature, beam=1, num_return=1)
                if temperature
                else replace(config, num_return=1)
            )
            rows = torch.tensor(left, device=self.device)
            limits = torch.full((len(left),), max_new_tokens, device=self.device)
            request = Request(prefix[rows], self.speech.end, limits, None, select(memory, rows), rule)
            seeds = [[config.seed or 0, some[row].at, round(10 * temperature)] for row in left]
            for row, [best] in zip(left, search(self.model, request, how, seeds), strict=True):
                text = self._text(best.tokens)
                found[row] = Answer(best.tokens, best.logprob, best.ended, temperature, text)
            left = [row for row in left if found[row].should_retry(silence[row])]
            if not left:
                break
        return [found[row] for row in range(len(some))]

    def _append_answer(self, one: Recording, answer: Answer, silence: float) -> None:
        """Append the answer to a window to its recording, and advance to the next window."""
        size = min(self.window, one.length - one.at)
        if answer.is_silent(silence):
            one.at += size
            return
        one.answers.append(answer)
        pieces, further = split_answer(answer.tokens, self.speech.zero if one.timed else None, size)
        for begin, end, tokens in pieces:
            text = self._text(tokens)
            if text.strip() and end > begin:
                times = [round((one.at + at) * FRAME_SECONDS, 2) for at in (begin, end)]
                one.segments.append(Segment(*times, text.strip(), answer.mean, silence, answer.temperature))
                one.said += tokens
        one.at += further or size

    def _text(self, tokens: Iterable[int]) -> str:
        zero = self.speech.zero
        return self.target.decode(t for t in tokens if zero is None or t < zero)

    def _transcript(self, one: Recording) -> Transcript:
        text = self._text(one.said).strip()
        if self.timestamps and self.speech.zero is not None:
            text = "\n".join(f"[{format_time(s.start)} -> {format_time(s.end)}] {s.text}" for s in one.segments)
        logprob, count = sum(a.logprob for a in one.answers), sum(len(a.tokens) + 1 for a in one.answers)
        names = {number: name for name, number in self.speech.languages.items()}
        ended = all(a.ended for a in one.answers)
        return Transcript(text, logprob / max(count, 1), logprob, self.target.tokens(one.said), ended, False,
                          names.get(one.language), one.segments)  # type: ignore[arg-type]  # fmt: skip


def split_answer(tokens: list[int], zero: int | None, size: int) -> tuple[list[tuple[int, int, list[int]]], int]:
    """Return the pieces of an answer to a window of `size` frames, as (first frame, last frame, tokens), and how many
    frames further the next window begins. Two adjacent timestamps end a piece; what has no end is transcribed again."""
    is_time = [zero is not None and token >= zero for token in tokens]
    frames = [2 * (token - (zero or 0)) for token in tokens]
    ends = [i + 1 for i in range(len(tokens) - 1) if is_time[i] and is_time[i + 1]]
    if not ends:
        last = next((at for at, time in zip(frames[::-1], is_time[::-1], strict=True) if time), 0)
        return [(0, last or size, tokens)], size
    done = is_time[-2:] == [False, True]  # there is no text after the last timestamp
    ends += [len(tokens)] if done else []
    begins = [0, *ends]
    pieces = [(frames[b], frames[e - 1], tokens[b:e]) for b, e in zip(begins, ends, strict=False)]
    return pieces, size if done else frames[ends[-1] - 1]


def format_time(seconds: float) -> str:
    """Return seconds as minutes: 75.5 -> 01:15.50."""
    minutes, rest = divmod(round(100 * seconds), 6000)
    hours, minutes = divmod(minutes, 60)
    return f"{f'{hours}:' if hours else ''}{minutes:02d}:{rest / 100:05.2f}"


class Sounds(Task):
    """The task of transcribing recordings. The recipe's [objective] may give the language and the task, for a model
    that has tokens for them."""

    objective_name = "transcribe"
    kind = "encoder-decoder"
    predictor = Transcriber
    answer_metrics = measures.TEXT_METRICS
    file_suffix = "sounds"

    def learn_tokenizers(self, corpus: Corpus, tick: Tick) -> None:
        self.source = self.target = self.tokenizer(corpus, self.job.tokenizer or self.default_tokenizer, tick, 1)

    def batches(self, model: Model, corpus: Corpus, say: Say, tick: Tick) -> Any:
        original = Path(self.job.origin or "", GENERATION_CONFIG)
        if self.job.origin and original.is_file():  # keep the special tokens of the original model
            kept = Path(self.job.run, GENERATION_CONFIG)
            kept.parent.mkdir(exist_ok=True)
            write_atomically(kept, original.read_text(encoding="utf-8"))
        return self._prepared(model, corpus.train, "train.sounds", self.settings.batch_tokens, say, tick)

    def dev(self, model: Model, lines: CorpusSplit) -> Dev:
        budget = max(self.settings.batch_tokens, DEV_TOKENS)
        batches = self._prepared(model, lines, "dev.sounds", budget, say_nothing, no_progress, shuffle=False)
        files, texts = group_references(lines, self.job.any_reference, self.job.dev_most) if self.metrics else ((), ())
        files = [str(folder_of(lines) / file) for file in files]
        return Dev(
            self.objective(),
            lambda: first_epoch(batches),
            self.make_predictor,
            self.loss_metrics,
            self.metrics,
            files,
            texts,
        )  # type: ignore[arg-type]

    def _prepared(
        self, model: Model, lines: CorpusSplit, name: str, budget: int, say: Say, tick: Tick, shuffle: bool = True
    ) -> RecordingBatches:
        run, s = self.make_predictor(model, None, False), self.settings
        limits = run.window * HOP, (model.limit or s.batch_tokens) - len(run.decoder_prefix) + 1
        skip = self.job.bad_lines == "skip"
        data = prepare_sounds(lines, self.target, self.data_path(name), limits, skip, partial(tick, "preparing"))
        if data.left_out:
            say(
                f"{lines.name}: {data.left_out:,} recordings are left out, for they are longer than the "
                f"{limits[0] / SAMPLE_RATE:g} s that the model hears (model.encoder.embed.length), their texts than "
                f"{limits[1]} tokens, or they cannot be read"
            )
        count = s.batch_size or budget * 2 // run.window
        return RecordingBatches(
            data, count, s.seed, (run.window, run.bands), run.decoder_prefix, self.target.pad, shuffle
        )

    def make_predictor(self, model: Model, folder: Path | None, documents: bool) -> Transcriber:
        made = Transcriber(model, self.source, self.target, folder)
        if folder is None and self.job.origin:
            made.load_speech_tokens(Path(self.job.origin))
        for name in ("language", "task"):
            if name in self.objective_args:
                setattr(made, name, self.objective_args[name])
        return made
