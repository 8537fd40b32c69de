"""Folders of sentence-transformers: a bare encoder, how its vectors are pooled, and whether they have length one."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from regard.convert import convert, every_family
from regard.convert.sentences import read
from regard.core import UserError, build, restore, save
from regard.files import recipe

from .encoders import CASES, LENGTHS, VALID, VOCAB, saved
from .live import near

MODULES = ("Transformer", "Pooling", "Normalize")


def sentences(folder, kinds=MODULES, mode="mean_tokens", longest=11):
    """Makes a folder of sentence-transformers of one with a bare model."""
    paths = [f"{i}_{kind}" if i else "" for i, kind in enumerate(kinds)]
    modules = [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
               for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    known = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")
    table = {"word_embedding_dimension": 24} | {f"pooling_mode_{one}": one == mode for one in known}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(table))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": longest, "do_lower_case": False}))


@pytest.mark.parametrize("name", ["bert bare", "distilbert bare", "roformer bare"])
@pytest.mark.parametrize(("mode", "unit"), [("mean_tokens", True), ("cls_token", False), ("max_tokens", True)])
def test_sentence_transformers(name, mode, unit, tmp_path):
    there = tmp_path / "there"
    model = saved(*CASES[name], there)
    sentences(there, MODULES if unit else MODULES[:2], mode)
    convert(there, tmp_path / "run")
    ours = restore(tmp_path / "run").eval()
    tokens = torch.randint(3, VOCAB, VALID.shape)
    with torch.no_grad():
        found = ours(tokens, VALID)
        x = model(input_ids=tokens, attention_mask=VALID.long()).last_hidden_state
    rows = [row[:length] for row, length in zip(x, LENGTHS, strict=True)]
    pools = {"mean_tokens": lambda row: row.mean(0), "cls_token": lambda row: row[0],
             "max_tokens": lambda row: row.max(0).values}  # fmt: skip
    want = torch.stack([pools[mode](row) for row in rows])
    near(found, want / want.norm(dim=-1, keepdim=True) if unit else want)
    assert ours.recipe["decode"] == {"max_source_tokens": 11, "truncate": True}
    assert ours.recipe["objective"] == {"part": "embed"}
    convert(tmp_path / "run", tmp_path / "back")
    before, after = (load_file(tmp_path / where / "model.safetensors") for where in ("there", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    for file in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json"):
        assert (there / file).read_bytes() == (tmp_path / "back" / file).read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kinds": ("Transformer", "Pooling", "Dense")}, "says Transformer, Pooling, Dense, and regard reads"),
        ({"mode": "mean_sqrt_len_tokens"}, "pools by mean_sqrt_len_tokens, and regard knows one of cls_token"),
        ({"mode": "none of them"}, "pools by nothing"),
    ],
)
def test_sentences_that_are_not_read(change, message, tmp_path):
    sentences(tmp_path, **change)
    with pytest.raises(UserError, match=message):
        read(tmp_path)
    (tmp_path / "modules.json").write_text("[1]")
    with pytest.raises(UserError, match=r"modules.json: \[0\]: is 1, and should be a table"):
        read(tmp_path)


def test_sentences_of_a_run_trained_here():
    """What goes out says how to pool, as what came in does."""
    bert = every_family()["bert"]
    config = bert.complete(bert.config(recipe.load("minilm") | {"vocab": 31}))
    files = bert.files(config, {})
    assert [module["type"].split(".")[-1] for module in files["modules.json"]] == list(MODULES)
    assert [key for key, on in files["1_Pooling/config.json"].items() if on is True] == ["pooling_mode_mean_tokens"]
    assert files["sentence_bert_config.json"]["max_seq_length"] == 256


def test_a_run_trained_here_goes_out(tmp_path):
    """MiniLM of our own: as a folder of sentence-transformers, which comes in again as the same model."""
    model = build("minilm", "tiny", 31, ["model.width=24", "model.heads=3", "model.depth=2"]).eval()
    save(model, tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text(json.dumps({"job": {"recipe": "minilm"}}))
    convert(tmp_path / "run", tmp_path / "there")
    _, report = transformers.BertModel.from_pretrained(tmp_path / "there", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    convert(tmp_path / "there", tmp_path / "again")
    again, tokens = restore(tmp_path / "again").eval(), torch.randint(31, VALID.shape)
    with torch.no_grad():
        assert torch.equal(again(tokens, VALID), model(tokens, VALID))
    assert again.recipe["decode"] == model.recipe["decode"]
