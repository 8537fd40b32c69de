"""Models that leave: what CTranslate2 and onnxruntime say is what regard says."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.cli import main
from regard.core import build
from regard.data import Tokenizer
from regard.decode import DecodeConfig
from regard.export import export, onnx
from regard.export.onnx_graph import compare
from regard.runs.job import Job
from regard.tasks.classify import TextClassifier
from regard.tasks.embed import Embedder
from regard.tasks.load import load
from regard.tasks.run import Run
from regard.train.job import start
from tests.export.graphs import LINES, WORDS, call, exported, session, shown, trained

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
    for one, other in zip(run.predict(texts, DecodeConfig(max_new_tokens=40)), theirs, strict=True):
        assert one[0].tokens == other.hypotheses[0]
    targets = [list(reversed(row)) for row in tokens]
    scored = translator.score_batch(tokens, targets)
    for text, target, told in zip(texts, targets, scored, strict=True):
        assert told.log_probs == pytest.approx(log_p(run, text, target), abs=2e-4)


def log_p(run: Run, text: str, target: list[str]) -> list[float]:
    ids = [*run.target.encode([" ".join(target)])[0], run.target.end]
    with torch.no_grad():
        memory = run.model.encode(torch.tensor(run.source.encode_with_special_tokens([text])))
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


SHALLOW = ["model.encoder.depth=1", "model.decoder.depth=1"]
T5 = [
    *(f"model.{side}.layer.0.mixer.dim=12" for side in ("encoder", "decoder")), "model.decoder.layer.0.cross.dim=12",
    *(f"model.{side}.layer.0.feedforward.hidden=40" for side in ("encoder", "decoder")), "objective.part=next_token",
]  # fmt: skip
ONNX_ENCODER_DECODERS = {
    "2017": ENCODER_DECODERS["2017"],
    "gates, rms, rotary": ENCODER_DECODERS["gates, rms, rotary"],
    "relative bias": ("t5", *T5),
}
ONNX_DECODERS = {"cache": ("gpt2",), "one token at a time": ("retnet",), "no cache": ("gau",)}
ONE = "model.depth=1"
RAGGED = {  # a model, and whether a step of its graph takes several tokens; see also test_onnx_continues_alike
    "rotary": (("llama", "model.layer.0.mixer.kv_heads=1", ONE), True),
    "alibi": (("alibi", ONE), True),
    "rwkv4": (("rwkv4", ONE), False),
    "rwkv6": (("rwkv6",), False),
    "gla": (("gla", ONE), False),
    "deltanet": (("deltanet", ONE), False),
}


@pytest.mark.parametrize("name", ONNX_ENCODER_DECODERS)
def test_onnx_translates_alike(name, tmp_path, monkeypatch, capsys):
    folder = trained(tmp_path, *ONNX_ENCODER_DECODERS[name], *SHALLOW, pairs=True)
    exported(folder, tmp_path / "out")
    run = load(folder)
    assert isinstance(run, Run)
    encoder, decoder = (session(tmp_path / "out" / f"{part}.onnx") for part in ("encoder", "decoder"))
    source = torch.randint(4, run.model.source_vocab, (3, 7))
    valid = torch.arange(7) < torch.tensor([7, 4, 1])[:, None]
    mask = valid.long().numpy()
    known = call(encoder, {"input_ids": source.numpy(), "attention_mask": mask}) | {"encoder_attention_mask": mask}
    check_steps(run, decoder, known, run.model.encode(source, valid), [(0, 4), (4, 5), (5, 9)])
    for text in ("one two three", "four nine", "six six one five eight"):
        assert (
            shown(tmp_path / "out", [text], monkeypatch, capsys) == run.predict([text], DecodeConfig(beam=1))[0][0].text
        )


@pytest.mark.parametrize("name", ONNX_DECODERS)
def test_onnx_continues_alike(name, tmp_path, monkeypatch, capsys):
    """GPT-2 in two layers, the others in one."""
    depth = 2 if name == "cache" else 1
    folder = trained(tmp_path, *ONNX_DECODERS[name], f"model.depth={depth}", pairs=False)
    exported(folder, tmp_path / "out")
    run, decoder = load(folder), session(tmp_path / "out" / "decoder.onnx")
    assert isinstance(run, Run)
    facts = json.loads((tmp_path / "out" / "model.json").read_text())
    assert (facts["end"], facts["cache"]) == (run.target.end, name != "no cache")
    if name == "no cache":
        check_prefixes(run, decoder)
    else:
        steps = [(0, 4), (4, 5), (5, 9)] if name == "cache" else [(i, i + 1) for i in range(9)]
        check_steps(run, decoder, {}, None, steps)
        check_ragged(run, tmp_path / "out", several=name == "cache")
    expected = run.predict(["three four"], DecodeConfig())[0][0].text
    assert shown(tmp_path / "out", ["three four"], monkeypatch, capsys) == expected.strip()


@pytest.mark.parametrize("name", RAGGED)
def test_onnx_rows_of_different_lengths(name, tmp_path):
    """As the README beside the graphs says: position_ids are -1 for padding, which changes nothing of its row."""
    (recipe, *sets), several = RAGGED[name]
    tokenizer = Tokenizer.train("words", LINES)
    torch.manual_seed(2)
    model = build(recipe, "tiny", tokenizer.size, ["model.width=24", "model.heads=2", "model.depth=2", *sets])
    run = Run(model, tokenizer, tokenizer)
    (tmp_path / "out").mkdir()
    onnx.write(run, tmp_path / "out", None)
    check_ragged(run, tmp_path / "out", several)


READERS = {
    "classify": ("transformer-encoder", "{a} {b}\t{label}\n", ["six two"]),
    "n-grams": ("fasttext", "{a} {b}\t{label}\n", ["six two"]),
    "tag": ("transformer-encoder", "{a}\tB-{label}\n{b}\tO\n\n", ["six two nine"]),
    "rate": ("bert", "{a} {b}\t{b} {a}\t{number}.5\n", ["six two", "two six nine"]),
    "masked": ("distilbert", "{a} {b} {a} {b} {a}\n", ["six [MASK] nine"]),
}


@pytest.mark.parametrize("name", READERS)
def test_onnx_reads_alike(name, tmp_path, monkeypatch, capsys):
    recipe, line, texts = READERS[name]
    data = tmp_path / ("data.conll" if name == "tag" else "data.txt" if name == "masked" else "data.tsv")
    rows = [(a, b, i) for i, (a, b) in enumerate((a, b) for a in WORDS for b in WORDS)]
    data.write_text("".join(line.format(a=a, b=b, label="yes" if a < b else "no", number=i % 7) for a, b, i in rows))
    task = {"rate": "match", "masked": None, "n-grams": "classify"}.get(name, name)
    sets = [
        "model.depth=1",
        "train.batch_tokens=400",
        "train.lr=0.01",
        "train.warmup=5",
        "train.steps=25",
        "train.context_length=12",
    ]
    dev = None if name == "masked" else "8"
    job = Job(
        recipe, str(tmp_path / "run"), "tiny", sets, str(data), dev=dev, tokenizer="words", task=task, as_published=True
    )
    start(job, say=lambda sentence: None).train()
    exported(tmp_path / "run", tmp_path / "out")
    run, graph = load(tmp_path / "run"), session(tmp_path / "out" / "model.onnx")
    for batch, length in ((1, 1), (2, 6), (4, 31)):
        tokens = torch.randint(4, run.source.size, (batch, length))
        valid = torch.arange(length) < torch.tensor([length, *[max(length // 2, 1)] * (batch - 1)])[:, None]
        types = (torch.arange(length) > 2).long().expand(batch, length).contiguous()
        given = {"input_ids": tokens, "attention_mask": valid.long(), "token_type_ids": types}
        found = call(graph, {key: value.numpy() for key, value in given.items()})["logits"]
        with torch.no_grad():
            expected = run.model(tokens, valid, segments=types if task == "match" else None).numpy()
        kept = valid.numpy() if expected.ndim == 3 else slice(None)
        assert found[kept] == pytest.approx(expected[kept], abs=1e-4)
    answer = run.predict(["\t".join(texts)])[0][0]
    printed = shown(tmp_path / "out", texts, monkeypatch, capsys)
    if name == "rate":
        assert float(printed) == pytest.approx(answer.score, abs=1e-4)
    else:
        assert printed == (answer.tokens[0] if name == "masked" else answer.text)


def test_onnx_hashes_n_grams_alike(tmp_path):
    """The first n-grams begin before the text, where the token is -1, and the mean is over what is not padding."""
    tokenizer = Tokenizer.train("words", LINES)
    torch.manual_seed(3)
    model = build("fasttext", "tiny", tokenizer.size, ["model.embed.n=3", "model.embed.buckets=37"])
    torch.nn.init.normal_(model.embed.ngram_table)
    (tmp_path / "out").mkdir()
    onnx.write(TextClassifier(model, tokenizer, tokenizer), tmp_path / "out", None)
    graph = session(tmp_path / "out" / "model.onnx")
    for batch, length in ((1, 1), (1, 2), (3, 7), (4, 130)):
        tokens = torch.randint(0, tokenizer.size, (batch, length))
        tokens[0, 0] = 0
        valid = torch.arange(length) < torch.tensor([length, *[max(length // 3, 1)] * (batch - 1)])[:, None]
        found = call(graph, {"input_ids": tokens.numpy(), "attention_mask": valid.long().numpy()})["logits"]
        with torch.no_grad():
            assert found == pytest.approx(model(tokens, valid).numpy(), abs=1e-5)


def test_onnx_embeds_alike(tmp_path, monkeypatch, capsys):
    tokenizer = Tokenizer.train("words", LINES)
    model = build("minilm", "tiny", tokenizer.size, ["model.depth=2"])
    run = Embedder(model, tokenizer, tokenizer)
    (tmp_path / "out").mkdir()
    onnx.write(run, tmp_path / "out", None)
    printed = shown(tmp_path / "out", ["six two nine"], monkeypatch, capsys)
    expected = run.embed(["six two nine"])[0].numpy()
    assert np.fromstring(printed.strip("[]"), sep=" ") == pytest.approx(expected, abs=1e-4)


def start_of(folder: Path, batch: int) -> dict:
    with np.load(folder / "start.npz") as kept:
        return {name: np.repeat(kept[name], batch, 0) for name in kept}


@torch.no_grad()
def check_steps(run: Run, decoder, known: dict, memory, steps: list[tuple[int, int]]) -> None:
    tokens = torch.randint(4, run.model.vocab, (3, 9))
    whole = run.model(tokens, memory=memory)
    held = start_of(run.folder.parent / "out", 3) | known
    for begin, end in steps:
        positions = np.broadcast_to(np.arange(begin, end), (3, end - begin)).copy()
        held |= call(decoder, held | {"input_ids": tokens[:, begin:end].numpy(), "position_ids": positions})
        assert held["logits"] == pytest.approx(whole[:, begin:end].numpy(), abs=1e-4)


@torch.no_grad()
def check_ragged(run: Run, folder: Path, several: bool) -> None:
    """Prompts of different lengths, padded on the right, and steps after them; then a row that has ended."""
    assert "`position_ids` count from 0 in every row, and are -1 for padding" in (folder / "README.md").read_text()
    decoder = session(folder / "decoder.onnx")
    lengths, tokens = torch.tensor([5, 2, 4]), torch.randint(4, run.model.vocab, (3, 9))
    columns = torch.arange(5)
    positions = torch.where(columns < lengths[:, None], columns, -1)
    held = start_of(folder, 3)
    for some in [columns] if several else columns.split(1):
        held |= call(decoder, held | {"input_ids": tokens[:, some].numpy(), "position_ids": positions[:, some].numpy()})
    for step in range(4):
        at = lengths[:, None] + step
        given = torch.where(torch.tensor([[True], [True], [step < 2]]), at, -1)
        held |= call(decoder, held | {"input_ids": tokens.gather(1, at).numpy(), "position_ids": given.numpy()})
        for row in range(3):
            if given[row] >= 0:
                expected = run.model(tokens[row : row + 1, : int(at[row]) + 1])[0, -1].numpy()
                assert held["logits"][row, -1] == pytest.approx(expected, abs=1e-4)


@torch.no_grad()
def check_prefixes(run: Run, decoder) -> None:
    tokens = torch.randint(4, run.model.vocab, (3, 9))
    for batch, length in ((1, 1), (3, 4), (2, 9)):
        prefix = tokens[:batch, :length]
        found = call(decoder, {"input_ids": prefix.numpy()})["logits"]
        assert found == pytest.approx(run.model(prefix).numpy(), abs=1e-4)


LSH = ("gpt2", "model.layer.0.mixer={part='lsh', buckets=8, rounds=1, size=8}", "model.depth=1")
REFUSED = {"ctranslate2": (("retnet",), "retention"), "onnx": (LSH, "lsh")}


@pytest.mark.parametrize("to", REFUSED)
def test_what_is_not_known_there_is_refused_by_name(to, tmp_path, capsys):
    recipe, part = REFUSED[to]
    folder = trained(tmp_path, *recipe, pairs=False)
    capsys.readouterr()
    assert main(["export", str(folder), str(tmp_path / "out"), "--to", to]) == 2
    told = capsys.readouterr().err.strip()
    assert f"the mixer '{part}'" in told
    assert "\n" not in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.txt", "run"]


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


def test_a_graph_of_a_model_that_rounds_may_not_differ_much():
    """The last bit of a sum may change what BitNet rounds, by a hundredth or two, and rarely the argmax."""
    model = build("bitnet", "tiny", 31, ["model.depth=1"])
    torch.manual_seed(4)
    expected = torch.randn(40, 31)
    compare(expected + 0.015 * torch.randn(40, 31), expected, model)
    with pytest.raises(ValueError, match="the graph and the model differ"):
        compare(expected + 0.15 * expected.abs().max() * (torch.rand(40, 31) - 0.5), expected, model)
    with pytest.raises(ValueError, match="differ by nan"):
        compare(torch.full_like(expected, torch.nan), expected, model)
    alike = torch.zeros(40, 31)
    alike[:, :2] = 10 + 0.1 * torch.randn(40, 2)
    with pytest.raises(ValueError, match="argmax of 40 of 40"):
        compare(alike[:, [1, 0, *range(2, 31)]], alike, model)
