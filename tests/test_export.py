"""Models that leave: what CTranslate2 and onnxruntime say is what regard says."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.cli import main
from regard.core import UserError
from regard.export import export
from regard.folder import load
from regard.run import Run, Way
from regard.train.job import Job, start

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
LINES = [f"{a} {b} {c}" for a in WORDS for b in WORDS[:4] for c in WORDS[2:6]]
SMALL = ["model.width=24", "model.heads=2", "model.depth=2", "model.dropout=0", "train.batch=400", "train.lr=0.01"]


def trained(tmp_path: Path, recipe: str, *sets: str, pairs: bool) -> Path:
    """A few steps, so that scores are not all alike."""
    if pairs:
        data = tmp_path / "data.tsv"
        data.write_text("".join(f"{line}\t{' '.join(reversed(line.split()))}\n" for line in LINES))
    else:
        data = tmp_path / "data.txt"
        data.write_text("".join(f"{line}\n\n" for line in LINES))
    job = Job(
        recipe, str(tmp_path / "run"), None, [*SMALL, "train.warmup=5", "train.steps=25", "train.context=12", *sets],
        str(data), dev="8" if pairs else None, tokenizer="words",
    )  # fmt: skip
    start(job, say=lambda sentence: None).train()
    return tmp_path / "run"


ENCODER_DECODERS = {
    "2017": ("transformer",),
    "pre-norm": ("transformer-preln",),
    "gates, rms, rotary": (
        "transformer-preln", "model.embed.position=none",
        *(f"model.{side}.layer.0.mixer.position=rotary" for side in ("encoder", "decoder")),
        *(f"model.{side}.layer.0.feedforward={{part='glu', hidden=40}}" for side in ("encoder", "decoder")),
        *(f"model.{side}.layer.0.wiring={{part='pre', norm='rms'}}" for side in ("encoder", "decoder")),
        *(f"model.{side}.norm=rms" for side in ("encoder", "decoder")),
    ),
}  # fmt: skip
DECODERS = {"gpt2": ("gpt2",), "llama": ("llama", "model.layer.0.mixer.kv_heads=1"), "alibi": ("alibi",)}


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_ctranslate2_translates_alike(name, tmp_path):
    import ctranslate2

    folder = trained(tmp_path, *ENCODER_DECODERS[name], pairs=True)
    export(folder, tmp_path / "out", "ctranslate2")
    run = load(folder)
    translator = ctranslate2.Translator(str(tmp_path / "out"), inter_threads=1, intra_threads=1)
    texts = [*LINES[::9], "seven", "one two three four five six seven"]
    tokens = [text.split() for text in texts]
    theirs = translator.translate_batch(tokens, beam_size=1, max_decoding_length=40, return_scores=True)
    for one, other in zip(run.predict(texts, Way(most=40)), theirs, strict=True):
        assert one[0].tokens == other.hypotheses[0]
    targets = [list(reversed(row)) for row in tokens]
    scored = translator.score_batch(tokens, targets)
    for text, target, told in zip(texts, targets, scored, strict=True):
        assert told.log_probs == pytest.approx(log_p(run, text, target), abs=2e-4)


def log_p(run: Run, text: str, target: list[str]) -> list[float]:
    ids = [*run.target.encode([" ".join(target)])[0], run.target.end]
    with torch.no_grad():
        memory = run.model.encode(torch.tensor(run.source.frame([text])))
        scores = run.model(torch.tensor([[run.target.start, *ids[:-1]]]), memory=memory)[0].log_softmax(-1)
    return [float(scores[i, token]) for i, token in enumerate(ids)]


@pytest.mark.parametrize("name", DECODERS)
def test_ctranslate2_generates_alike(name, tmp_path):
    import ctranslate2

    folder = trained(tmp_path, *DECODERS[name], pairs=False)
    export(folder, tmp_path / "out", "ctranslate2")
    run = load(folder)
    generator = ctranslate2.Generator(str(tmp_path / "out"), inter_threads=1, intra_threads=1)
    ids = run.target.encode(["one two three four five six"])[0]
    theirs = np.array(generator.forward_batch([ids]))
    with torch.no_grad():
        ours = run.model(torch.tensor([ids])).numpy()
    assert theirs == pytest.approx(ours, abs=1e-4)


def test_onnx_translates_alike(tmp_path):
    folder = trained(tmp_path, *ENCODER_DECODERS["gates, rms, rotary"], "model.depth=1", pairs=True)
    export(folder, tmp_path / "out", "onnx")
    run = load(folder)
    encoder, decoder = (session(tmp_path / "out" / f"{part}.onnx") for part in ("encoder", "decoder"))
    source = torch.randint(4, run.model.source_vocab, (3, 7))
    valid = torch.arange(7) < torch.tensor([7, 4, 1])[:, None]
    crossing = [one.name for one in encoder.get_outputs()]
    cross = dict(zip(crossing, encoder.run(None, {"tokens": source.numpy(), "valid": valid.numpy()}), strict=True))
    memory = run.model.encode(source, valid)
    check_steps(run, decoder, cross | {"source_valid": valid.numpy()}, memory)


@pytest.mark.parametrize("name", ["gpt2", "alibi"])
def test_onnx_continues_alike(name, tmp_path):
    folder = trained(tmp_path, *DECODERS[name], "model.depth=1", pairs=False)
    export(folder, tmp_path / "out", "onnx")
    run = load(folder)
    assert json.loads((tmp_path / "out" / "model.json").read_text())["end"] == run.target.end
    check_steps(run, session(tmp_path / "out" / "decoder.onnx"), {}, None)


def session(path: Path):
    import onnxruntime

    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@torch.no_grad()
def check_steps(run: Run, decoder, known: dict, memory) -> None:
    """In steps of several sizes, from nothing, with a padded row."""
    tokens = torch.randint(4, run.model.vocab, (3, 9))
    whole = run.model(tokens, memory=memory)
    inputs = {one.name: one for one in decoder.get_inputs()}
    past = {name: np.zeros((3, 0, *one.shape[2:]), np.float32) for name, one in inputs.items() if "past." in name}
    at = np.zeros((3, 0), np.int64)
    for begin, end in ((0, 4), (4, 5), (5, 9)):
        positions = np.broadcast_to(np.arange(begin, end), (3, end - begin)).copy()
        given = {"tokens": tokens[:, begin:end].numpy(), "positions": positions, "at": at, **past, **known}
        scores, at, *now = decoder.run(None, {name: value for name, value in given.items() if name in inputs})
        past = dict(zip(past, now, strict=True))
        assert scores == pytest.approx(whole[:, begin:end].numpy(), abs=1e-4)


def test_what_is_not_known_there_is_refused_by_name(tmp_path):
    folder = trained(tmp_path, "retnet", pairs=False)
    for to in ("ctranslate2", "onnx"):
        with pytest.raises(UserError, match="the mixer 'retention'"):
            export(folder, tmp_path / to, to)
        assert not (tmp_path / to).exists()
        assert not (tmp_path / f"{to}.part").exists()


def test_the_command(tmp_path, capsys):
    folder = trained(tmp_path, "transformer", pairs=True)
    assert main(["export", str(folder), str(tmp_path / "out"), "--numbers", "int8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"model.bin", "config.json", "shared_vocabulary.json"} <= told["files"].keys()
    assert main(["export", str(folder), str(tmp_path / "out")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert main(["export", str(folder), str(tmp_path / "o"), "--to", "onx"]) == 2
    assert "onnx" in capsys.readouterr().err
    assert main(["export", str(folder), str(tmp_path / "o"), "--numbers", "int7"]) == 2
    assert "int8" in capsys.readouterr().err
