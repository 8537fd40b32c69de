"""Transcription: windows, timestamps, languages and retries, against `transformers` and alone."""

import json
import wave

import pytest
import tokenizers
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from regard.cli import main
from regard.convert import convert
from regard.convert.family import family_of
from regard.core import UserError, build
from regard.data import Tokenizer
from regard.data.mel import HOP, SAMPLE_RATE
from regard.decode import DecodeConfig, Hypothesis
from regard.runs.job import Job
from regard.tasks import transcribe
from regard.tasks.load import load
from regard.tasks.speech import SpeechTokens
from regard.tasks.transcribe import Answer, Transcriber, format_time, split_answer
from regard.train.job import start

WORDS, END, START, EN, DE, TRANSLATE, TRANSCRIBE, SILENCE, PLAIN, ZERO = 30, 30, 31, 32, 33, 34, 35, 36, 37, 38
PLACES, BANDS = 30, 6  # positions of the encoder: a window of 60 frames, 0.6 s
VOCAB = ZERO + PLACES + 1
NAMES = [f"w{i}" for i in range(WORDS)] + ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>"]
NAMES += ["<|translate|>", "<|transcribe|>", "<|nospeech|>", "<|notimestamps|>"]
NAMES += [f"<|{0.02 * i:.2f}|>" for i in range(PLACES + 1)]
TOLD = {
    "decoder_start_token_id": START, "eos_token_id": END, "pad_token_id": END, "bos_token_id": END,
    "no_timestamps_token_id": PLAIN, "is_multilingual": True, "lang_to_id": {"<|en|>": EN, "<|de|>": DE},
    "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE}, "max_initial_timestamp_index": 4,
    "suppress_tokens": [3, 5, START, EN, DE, TRANSLATE, TRANSCRIBE, SILENCE, PLAIN], "begin_suppress_tokens": [7, END],
}  # fmt: skip


def tokenizer() -> Tokenizer:
    vocab = {name: number for number, name in enumerate(NAMES)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer(inner, {"start": START, "end": END, "pad": END})


def pair(tmp_path, seed: int = 0, **more) -> tuple[Transcriber, WhisperForConditionalGeneration]:
    """Return our model and that of `transformers` with the same large random weights."""
    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=BANDS, d_model=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=3,
        decoder_attention_heads=3, encoder_ffn_dim=40, decoder_ffn_dim=44, max_source_positions=PLACES,
        max_target_positions=40, **{name: TOLD[name] for name in list(TOLD)[:4]}, begin_suppress_tokens=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    theirs = WhisperForConditionalGeneration(config).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.35 * torch.randn_like(parameter))
        theirs.proj_out.weight[END] += 0.3
    for name, value in (TOLD | more).items():
        setattr(theirs.generation_config, name, value)
    told = config.to_dict()
    family = family_of(told)
    ours = build(family.recipe(family.complete(told))).double()
    tensors = theirs.state_dict()
    for rule in family.rules(family.complete(told), set(tensors)):
        for name, value in zip(rule.ours, rule.split(tensors[rule.theirs]), strict=True):
            ours.state_dict()[name].copy_(value)
    (tmp_path / "origin").mkdir(exist_ok=True, parents=True)
    (tmp_path / "origin" / "generation_config.json").write_text(json.dumps(TOLD | more))
    one = tokenizer()
    return Transcriber(ours, one, one, tmp_path), theirs


def sound(frames: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    loud = torch.rand(frames, generator=draw).repeat_interleave(HOP)
    return torch.randn(frames * HOP, generator=draw) * loud


@pytest.fixture
def once(monkeypatch):
    """Disable retries and the detection of silence."""
    monkeypatch.setattr(transcribe, "TEMPERATURES", (0.0,))
    monkeypatch.setattr(transcribe, "MAX_NO_SPEECH", 2.0)


def told(theirs, frames, **more):
    found = theirs.generate(frames.mT[None].double(), return_segments=True, max_new_tokens=17, **more)
    zero = lambda tokens: [t for t in tokens if t != END]  # noqa: E731
    return [(float(s["start"]), float(s["end"]), zero(s["tokens"].tolist())) for s in found["segments"][0]]


def pieces(run, samples, config):
    """Record all segments with their tokens, empty ones included, as `transformers` returns them, and their number per
    window."""
    found, windows = [], []
    plain = Transcriber._append_answer

    def take(one, answer, silence):
        size = min(run.window, one.length - one.at)
        some, _ = split_answer(answer.tokens, run.speech.zero if one.timed else None, size)
        found.extend(((one.at + b) * 0.01, (one.at + e) * 0.01, tokens) for b, e, tokens in some)
        found[-1][2].extend(answer.tokens[sum(len(tokens) for _, _, tokens in some) :][:1])  # theirs keep both times
        windows.append(len(found))
        plain(run, one, answer, silence)

    run._append_answer = take
    run.predict([samples], config)
    return found, windows


BEAMS = {"num_beams": 3, "early_stopping": True, "renormalize_logits": True}  # what is likely, by what is allowed


@pytest.mark.parametrize("timestamps", [False, True])
@pytest.mark.parametrize(("language", "beam"), [("de", 1), (None, 1), ("de", 3)])
def test_the_same_words_and_times_as_transformers(tmp_path, once, timestamps, language, beam):
    """Compare a full window; `transformers` pads a shorter one with zeros, and we with silence."""
    more = {"task": "transcribe", "return_timestamps": timestamps} | (BEAMS if beam > 1 else {})
    seen = set()
    words_alone = {} if timestamps else {"suppress_tokens": [*TOLD["suppress_tokens"], *range(ZERO, VOCAB)]}
    for seed in range(3):
        run, theirs = pair(tmp_path, seed, **words_alone)
        samples = sound(2 * PLACES, seed)
        run.language, run.timestamps = language, timestamps
        frames = run.read_recording(samples).frames[: run.window]
        want = told(theirs, frames, language=language, **more)
        ours, windows = pieces(run, samples, DecodeConfig(beam=beam, max_new_tokens=17))
        ours, want = ours[: windows[0]], want[: windows[0]]
        assert [tokens for _, _, tokens in ours] == [tokens for _, _, tokens in want]
        if timestamps:
            assert [(b, e) for b, e, _ in ours] == [pytest.approx((b, e)) for b, e, _ in want]
        seen |= {tuple(tokens) for _, _, tokens in ours}
    assert len(seen) > 2


def test_the_same_language_as_transformers(tmp_path, once):
    found = set()
    for seed in range(4):
        run, theirs = pair(tmp_path, seed)
        frames = run.read_recording(sound(2 * PLACES, seed)).frames[: run.window]
        want = theirs.detect_language(frames.mT[None].double())
        answer = run.predict([sound(2 * PLACES, seed)], DecodeConfig(max_new_tokens=2))[0][0]
        assert answer.language == {EN: "en", DE: "de"}[int(want)]
        found.add(answer.language)
    assert len(found) == 2


def test_long_recordings_as_transformers(tmp_path, once):
    """Each window begins at the last timestamp of the previous one; `transformers` pads the last with zeros."""
    windows = 0
    for seed in range(3):
        run, theirs = pair(tmp_path, seed)
        samples, run.language = sound(5 * PLACES + 7, seed), "en"
        heard = run.read_recording(samples)
        assert heard.timed
        frames = heard.frames[: heard.length]
        want = told(theirs, frames, language="en", task="transcribe", return_timestamps=True)
        ours, _ = pieces(run, samples, DecodeConfig(max_new_tokens=17))
        last = (heard.length - run.window) * 0.01
        sure = [one for one in ours if one[0] < last - 0.3]
        assert sure == [(pytest.approx(b), pytest.approx(e), tokens) for b, e, tokens in want[: len(sure)]]
        windows += len(sure)
    assert windows > 4


def test_a_batch_is_its_recordings_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(transcribe, "TEMPERATURES", (0.0, 0.5))
    run, _ = pair(tmp_path, 1)
    sounds = [sound(frames, frames) for frames in (60, 13, 71, 1)]
    for config in (DecodeConfig(beam=3, max_new_tokens=4), DecodeConfig(temperature=0.7, seed=4, max_new_tokens=5)):
        together = run.predict(sounds, config)
        alone = [run.predict([one], config)[0] for one in sounds]
        for [one], [two] in zip(together, alone, strict=True):
            assert (one.text, one.language) == (two.text, two.language)
            assert one.logprob == pytest.approx(two.logprob)
    assert len({one.text for [one] in together}) > 2


def fake(run, monkeypatch, answers, silence=0.0):
    """Replace the search by one that returns these answers in turn; return the list of its calls."""
    asked = []

    def search(model, request, config, seeds):
        asked.append(config)
        return [[answers[min(len(asked), len(answers)) - 1]]]

    monkeypatch.setattr(transcribe, "search", search)
    if silence:
        plain = run.model.forward
        loud = torch.nn.functional.one_hot(torch.tensor(SILENCE), VOCAB).double() * 50
        monkeypatch.setattr(run.model, "forward", lambda *given, **more: plain(*given, **more) + loud)
    return asked


GOOD = Hypothesis([1, 2, 4], -0.4, -0.4, True)
UNSURE = Hypothesis([1, 2, 4], -9.0, -9.0, True)
ROUND = Hypothesis([6] * 60, -1.0, -1.0, True)


@pytest.mark.parametrize(
    ("answers", "temperatures"),
    [([GOOD], [0]), ([UNSURE, GOOD], [0, 0.2]), ([ROUND, UNSURE, GOOD], [0, 0.2, 0.4]),
     ([UNSURE], [0, 0.2, 0.4, 0.6, 0.8, 1.0])],
)  # fmt: skip
def test_a_poor_answer_is_tried_again(tmp_path, monkeypatch, answers, temperatures):
    run, _ = pair(tmp_path)
    asked = fake(run, monkeypatch, answers)
    [[one]] = run.predict([sound(40)], DecodeConfig(beam=3))
    assert [config.temperature for config in asked] == temperatures
    assert [config.beam for config in asked] == [3] + [1] * (len(temperatures) - 1)
    assert one.segments[0].temperature == temperatures[-1]
    assert one.text == run.target.decode(answers[-1].tokens)
    assert (one.segments[0].start, one.segments[0].end) == (0.0, 0.4)


def test_a_temperature_that_is_given_is_the_only_one(tmp_path, monkeypatch):
    run, _ = pair(tmp_path)
    asked = fake(run, monkeypatch, [UNSURE])
    run.predict([sound(40)], DecodeConfig(temperature=0.3))
    assert [config.temperature for config in asked] == [0.3]


def test_silence(tmp_path, monkeypatch):
    """Unlikely words in a window without speech are dropped; likely words are kept."""
    run, _ = pair(tmp_path)
    asked = fake(run, monkeypatch, [UNSURE], silence=1.0)
    [[one]] = run.predict([sound(130)])
    assert (one.text, one.segments, len(asked)) == ("", [], 3)
    fake(run, monkeypatch, [GOOD])
    assert run.predict([sound(40)])[0][0].text == "w1 w2 w4"


def test_what_is_told(tmp_path, monkeypatch):
    run, _ = pair(tmp_path)
    run.language, run.timestamps = "en", True
    tokens = [ZERO, 1, 2, ZERO + 10, ZERO + 12, 4, ZERO + 20]
    fake(run, monkeypatch, [Hypothesis(tokens, -0.5, -0.5, True)])
    [[one]] = run.predict([sound(60)])
    assert one.text == "[00:00.00 -> 00:00.20] w1 w2\n[00:00.24 -> 00:00.40] w4"
    assert [(s.start, s.end, s.text) for s in one.segments] == [(0.0, 0.2, "w1 w2"), (0.24, 0.4, "w4")]
    assert one.tokens[0] == "<|0.00|>"
    assert one.score == pytest.approx(-0.5 / 8)


def spoken(path, frames):
    with wave.open(str(path), "wb") as out:
        out.setparams((1, 2, SAMPLE_RATE, 0, "NONE", ""))
        out.writeframes((sound(frames).clamp(-1, 1) * (2**15 - 1)).short().numpy().astype("<i2").tobytes())
    return str(path)


def converted(tmp_path):
    """A folder as theirs is saved, and the run that it becomes in tmp_path / "run"."""
    ours, theirs = pair(tmp_path / "made")
    theirs.float().save_pretrained(tmp_path / "theirs")
    ours.target.save(tmp_path / "theirs" / "tokenizer.json")
    (tmp_path / "theirs" / "generation_config.json").write_text(json.dumps(TOLD))
    convert(tmp_path / "theirs", tmp_path / "run")
    return ours, theirs


def test_a_folder_that_comes_in_answers(tmp_path, capsys):
    ours, _ = converted(tmp_path)
    assert load(tmp_path / "run").speech == ours.speech
    given = ["predict", str(tmp_path / "run"), spoken(tmp_path / "talk.wav", 70), "--language", "de"]
    assert (
        main([*given, "--task", "translate", "--timestamps", "--max-new-tokens", "5", "--temperature", "0.1", "--json"])
        == 0
    )
    [answer] = json.loads(capsys.readouterr().out)["answers"]
    assert answer["language"] == "de"
    assert all(one["end"] > one["start"] for one in answer["segments"])
    assert main([*given[:3], "--language", "xx"]) == 2
    assert "does not know the language 'xx'" in capsys.readouterr().err


def test_a_folder_that_learns_on_and_goes_out(tmp_path):
    """Fine-tuning uses the prompt of the language, and keeps the special tokens."""
    ours, theirs = converted(tmp_path)
    spoken(tmp_path / "talk.wav", 70)
    (tmp_path / "talks.tsv").write_text("talk.wav\tw1 w2\n" * 3)
    sets = ["train.steps=1", "train.batch_size=2", "train.lr=0.0", "objective.language=de"]
    more = Job("whisper", str(tmp_path / "more"), None, sets, str(tmp_path / "talks.tsv"), dev="0", test="0",
               origin=str(tmp_path / "run"), as_published=True)  # fmt: skip
    with pytest.raises(UserError, match=r"none of the 3 recordings is at most 0.6 s long"):
        start(more, print)
    spoken(tmp_path / "talk.wav", 50)
    prepared = start(more, print)
    assert next(prepared.trainer.learner.feed).tokens[0].tolist() == [START, DE, TRANSCRIBE, PLAIN, 1, 2]
    prepared.train()
    assert load(tmp_path / "more").speech == ours.speech
    convert(tmp_path / "more", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == TOLD
    again = WhisperForConditionalGeneration.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in theirs.state_dict().items())


def test_pieces_of_an_answer():
    one, two, three = ZERO + 5, ZERO + 9, ZERO + 14
    assert split_answer([ZERO, 1, one, two, 2, three], ZERO, 60) == (
        [(0, 10, [ZERO, 1, one]), (18, 28, [two, 2, three])],
        60,
    )
    assert split_answer([ZERO, 1, one, two, 2], ZERO, 60) == ([(0, 10, [ZERO, 1, one])], 10)
    assert split_answer([ZERO, 1, one, one], ZERO, 60) == ([(0, 10, [ZERO, 1, one])], 10)
    assert split_answer([ZERO, 1, one], ZERO, 60) == ([(0, 10, [ZERO, 1, one])], 60)
    assert split_answer([ZERO, 1, 2], ZERO, 50) == ([(0, 50, [ZERO, 1, 2])], 50)
    assert split_answer([], None, 50) == ([(0, 50, [])], 50)


def test_prompts(tmp_path):
    run, _ = pair(tmp_path)
    speech = run.speech
    assert speech.prompt(DE, "transcribe", False) == [START, DE, TRANSCRIBE, PLAIN]
    assert speech.prompt(EN, "translate", True) == [START, EN, TRANSLATE]
    alone = SpeechTokens.of(tokenizer())  # nothing but the names of the tokens
    assert (
        alone._replace(suppressed=speech.suppressed, suppressed_first=speech.suppressed_first, max_initial_timestamp=4)
        == speech
    )
    (tmp_path / "origin" / "generation_config.json").write_text(json.dumps(TOLD | {"is_multilingual": False}))
    english = SpeechTokens.of(tokenizer(), tmp_path)
    assert english.prompt(None, "transcribe", False) == [START, PLAIN]
    plain = Tokenizer.train("characters", ["abc"])
    assert SpeechTokens.of(plain).prompt(None, "transcribe", True) == [plain.start]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"language": "dd"}, "does not know the language 'dd'; did you mean 'de'? (known: de, en)"),
        ({"task": "translat"}, "unknown task 'translat'; did you mean 'translate'?"),
    ],
)
def test_bad_wishes(tmp_path, given, message):
    run, _ = pair(tmp_path)
    for name, value in given.items():
        setattr(run, name, value)
    with pytest.raises(UserError) as error:
        run.predict([sound(9)])
    assert message in str(error.value)


def test_bad_input(tmp_path):
    run, _ = pair(tmp_path)
    with pytest.raises(UserError, match="recordings come in a list"):
        run.predict("talk.wav")
    with pytest.raises(UserError, match="one row of numbers"):
        run.predict([torch.zeros(2, 900)])
    assert run.predict([torch.zeros(0)])[0][0].text == ""


def test_poor_and_silent():
    sure = Answer([1, 2, 4], -0.4, True, 0.0, "a few plain words")
    assert not sure.should_retry(0.0)
    assert sure._replace(logprob=-4.1).should_retry(0.0)
    assert not sure._replace(logprob=-3.9).should_retry(0.0)
    assert sure._replace(text="and so on " * 9).should_retry(0.0)
    assert not sure._replace(logprob=-4.1).should_retry(0.61)
    assert sure._replace(logprob=-4.1).is_silent(0.61)
    assert not sure.is_silent(0.61)


def test_format_time():
    assert [format_time(s) for s in (0, 75.5, 59.999, 3600)] == ["00:00.00", "01:15.50", "01:00.00", "1:00:00.00"]


def test_times_of_a_model_that_tells_none(tmp_path):
    ours, _ = pair(tmp_path)
    ours.speech, ours.timestamps = SpeechTokens(START, END), True
    with pytest.raises(UserError, match="this model has no timestamps: leave out --timestamps"):
        ours.predict([sound(9)])
