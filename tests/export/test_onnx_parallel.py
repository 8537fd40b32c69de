"""Decoders that write all tokens at once, as ONNX graphs: padded rows in onnxruntime are rows alone in regard, and the
code in the README says what `predict` says."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from regard.core import BLANK, Context, Model, UserError
from regard.data import Tokenizer
from regard.decode.canvas import best_canvases
from regard.export import ctranslate2, onnx
from regard.files import recipe
from regard.ops import crf
from regard.schema import name_of
from regard.tasks.load import load
from regard.tasks.translate_parallel import ParallelTranslator
from tests.export.graphs import LINES, call, exported, session, shown, trained
from tests.models import shallow

NAMES = [name for name in recipe.names() if "length" in recipe.load(name)["model"]]
TRAINED = ("nat", "nat-ctc")  # through the command; of the others, the graphs of an untrained model are written
REFUSED = {"levenshtein": "a decoder that edits is not exported: it deletes, inserts and fills in by turns"}
SMALL = ["model.width=24", "model.heads=2", "model.encoder.depth=1", "model.decoder.depth=1"]
HEADS = {"crf": ["model.head.rank=4", "model.head.candidates=5"], "dag": ["model.head.heads=2"]}
SOURCES, CANVASES = (7, 4, 1), (3, 8, 5)
TEXTS = ("one two three", "four nine", "six six one five eight", "ten")


def untrained(name: str) -> ParallelTranslator:
    """With weights so large that the scores of tokens are far apart."""
    tokenizer, table = Tokenizer.train("words", LINES), recipe.load(name)["model"].get("head", {})
    torch.manual_seed(3)
    model = shallow(name, tokenizer.size, [*SMALL, *(HEADS.get(table["part"], []) if table else [])]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)
    return ParallelTranslator(model, tokenizer, tokenizer)


def distinct() -> list[str]:
    """The recipes that are exported, but for those that differ from another only in how they are trained, as GLAT does
    from NAT."""
    found: dict[str, str] = {}
    for name in sorted(NAMES, key=len):
        if name not in REFUSED:
            table = recipe.load(name)
            found.setdefault(repr((table["model"], table["decode"])), name)
    return list(found.values())


@pytest.mark.parametrize("name", distinct())
def test_it_writes_alike(name, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "out"
    if name in TRAINED:
        sets = [*SMALL, *(["model.length.extra=3"] if name == "nat-ctc" else [])]
        exported(trained(tmp_path, name, *sets, pairs=True), folder)
        run = load(tmp_path / "run")
    else:
        run = untrained(name)
        folder.mkdir()
        onnx.write(run, folder, None)
    assert isinstance(run, ParallelTranslator)
    check_rows(run.model, folder)
    config, answers = replace(run.config, length_beam=1), []
    for text in TEXTS:
        answers.append(shown(folder, [text], monkeypatch, capsys))
        assert answers[-1] == run.predict([text], config)[0][0].text
    assert len(set(answers)) > 1


@torch.no_grad()
def check_rows(model: Model, folder: Path) -> None:
    """All rows together in onnxruntime, with tokens where they are padded, and each row alone in regard."""
    torch.manual_seed(5)
    encoder, decoder = (session(folder / f"{part}.onnx") for part in ("encoder", "decoder"))
    source, canvas = torch.randint(4, model.source_vocab, (3, 7)), torch.randint(4, model.vocab, (3, 8))
    canvas[torch.rand(3, 8) < 0.6] = BLANK
    masks = [torch.arange(max(sizes)) < torch.tensor(sizes)[:, None] for sizes in (SOURCES, CANVASES)]
    source_mask, canvas_mask = (mask.long().numpy() for mask in masks)
    found = call(encoder, {"input_ids": source.numpy(), "attention_mask": source_mask})
    given = {"input_ids": canvas.numpy(), "canvas_mask": canvas_mask, "encoder_attention_mask": source_mask}
    found |= call(decoder, found | given)
    for row, (size, n) in enumerate(zip(SOURCES, CANVASES, strict=True)):
        alone, said = source[row : row + 1, :size], canvas[row : row + 1, :n]
        memory = model.encode(alone)
        assert found["lengths"][row] == best_canvases(model, memory, 1).lengths[0, 0]
        assert ("copies" in found) == (memory.copies is not None)
        if memory.copies is not None:
            assert found["copies"][row].tolist() == memory.copies[0].tolist() + [0] * (7 - size)
        context = Context.begin(1, n, memory=memory)
        x = model.hidden(said, context)
        logits = model.head(x, context)
        for key, wanted in {"logits": logits, **searched(model, x, context, logits)}.items():
            steps = n - 1 if key == "transitions" else n
            one = found[key][row, :steps]
            assert (one[:, :n] if key == "links" else one) == pytest.approx(wanted[0].numpy(), abs=1e-4)


def searched(model: Model, x: Tensor, context: Context, logits: Tensor) -> dict[str, Tensor]:
    """What the search of a head needs beside the logits."""
    if name_of(model.head) == "dag":
        return {"links": model.head.links(x, context)}
    if name_of(model.head) == "crf":
        tokens = crf.candidates(logits, 5)
        return {"candidates": tokens, "transitions": model.head.transitions(x, tokens)}
    return {}


@pytest.mark.parametrize("name", REFUSED)
def test_an_editor_is_refused(name, tmp_path):
    with pytest.raises(UserError, match=REFUSED[name]):
        onnx.write(untrained(name), tmp_path, None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_ctranslate2_has_none(name, tmp_path):
    with pytest.raises(UserError, match="does not support decoders that write all tokens at once, so this model"):
        ctranslate2.write(untrained(name), tmp_path, None)
