"""Converted models in use: generating without a start token, without a head, and evaluated."""

import json
import math

import pytest
import torch
import transformers
from PIL import Image

import regard
from regard.cli import main
from regard.convert import convert
from regard.data import Tokenizer
from regard.decode import DecodeConfig
from regard.tasks.permuted import PermutedRun

TEXTS = ["once upon a time", "a cat and a dog", "once a dog"]
PLACES = 24


@pytest.fixture(scope="module")
def words():
    return Tokenizer.train("bpe", TEXTS * 9, 290)


def converted(folder, kind, words, **config):
    """Return the model of `transformers`, and the converted run."""
    torch.manual_seed(0)
    marks = {"bos_token_id": words.start, "eos_token_id": words.end, "pad_token_id": words.pad}
    theirs = kind(kind.config_class(vocab_size=words.size, **config, **marks)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    theirs.save_pretrained(folder / "theirs")
    words.save(folder / "theirs" / "tokenizer.json")
    convert(folder / "theirs", folder / "run")
    return theirs, folder / "run"


def gpt2(folder, words, kind=transformers.GPT2LMHeadModel):
    return converted(folder, kind, words, n_positions=PLACES, n_embd=12, n_layer=1, n_head=2)


@pytest.mark.parametrize("running", [True, False])
def test_the_loss_of_a_text(running, tmp_path, words, capsys):
    """The loss is computed after the start token; separate texts end in the end token, a running text does not."""
    theirs, run = gpt2(tmp_path, words)
    path = tmp_path / ("text.txt" if running else "text.jsonl")
    path.write_text("".join(f"{text}\n" if running else json.dumps({"text": text}) + "\n" for text in TEXTS[:2]))
    assert main(["evaluate", str(run), "--data", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    if running:
        ids = words.encode(["".join(f"{text}\n" for text in TEXTS[:2])])[0]
    else:
        ids = [i for text in words.encode(TEXTS[:2]) for i in [*text, words.end]]
    assert len(ids) <= PLACES
    with torch.no_grad():
        logs = theirs(torch.tensor([[words.start, *ids[:-1]]])).logits[0].log_softmax(-1)
    assert told["counts"]["tokens"] == len(ids)
    assert told["scores"]["loss"] == pytest.approx(-logs[range(len(ids)), ids].mean().item(), abs=1e-4)
    assert told["scores"]["perplexity"] == pytest.approx(math.exp(told["scores"]["loss"]), rel=1e-4)


def test_an_empty_prompt_may_go_on_to_the_last_position(tmp_path, words):
    run = regard.load(gpt2(tmp_path, words)[1])
    assert run.decoder_prefix == []
    for answers in run.predict(["", "once"], DecodeConfig(max_new_tokens=99)):
        assert answers[0].ended or len(answers[0].tokens) >= PLACES - 4


def test_a_decoder_without_a_head_gives_vectors(tmp_path, words, capsys):
    theirs, run = gpt2(tmp_path, words, transformers.GPT2Model)
    loaded = regard.load(run)
    with torch.no_grad():
        hidden = theirs(torch.tensor(loaded.source.encode_with_special_tokens(TEXTS[:1]))).last_hidden_state[0]
    assert torch.allclose(loaded.embed(TEXTS, pool="mean")[0], hidden.mean(0), atol=1e-5)
    with pytest.raises(
        regard.UserError, match=f"at most {PLACES} can be taken: shorten it, or let it be cut .--truncate"
    ):
        loaded.embed(["once " * 99])


def test_xlnet_reads_a_prompt_as_they_do(tmp_path, words):
    """Generation begins without any token before it."""
    theirs, run = converted(
        tmp_path, transformers.XLNetLMHeadModel, words, d_model=12, n_layer=1, n_head=2, d_inner=20
    )  # fmt: skip
    loaded = regard.load(run)
    assert isinstance(loaded, PermutedRun)
    ids = words.encode(TEXTS[:1])[0]
    row = torch.tensor([[*ids, 0]])
    hidden, asked = torch.zeros(1, len(ids) + 1, len(ids) + 1), torch.zeros(1, 1, len(ids) + 1)
    hidden[:, :, -1] = asked[:, :, -1] = 1
    with torch.no_grad():
        logs = theirs(row, perm_mask=hidden, target_mapping=asked).logits[0, 0].log_softmax(-1)
    answer = loaded.predict(TEXTS[:1], DecodeConfig(max_new_tokens=1))[0][0]
    assert answer.logprob == pytest.approx(logs.max().item(), abs=1e-4)


def test_all_pictures_that_are_named_count(tmp_path, capsys):
    """All data is evaluated, unless it has splits."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20, image_size=8, patch_size=4,
        id2label={0: "red", 1: "blue"}, label2id={"red": 0, "blue": 1},
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "run")
    for place, count in (("all", 3), ("parts/train", 2), ("parts/test", 1)):
        for colour in ("red", "blue"):
            (tmp_path / place / colour).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (8, 8), colour).save(tmp_path / place / colour / f"{number}.png")
    for place, count in (("all", 6), ("parts", 2)):
        assert main(["evaluate", str(tmp_path / "run"), "--data", str(tmp_path / place), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["counts"] == {"pictures": count}
    assert main(["evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "parts"), "--part", "dev"]) == 2
    assert "there is no dev part" in capsys.readouterr().err


def test_labels_have_marks_of_their_own(tmp_path, words):
    """The id of the pad token may equal that of a label."""
    kind = transformers.GPT2ForSequenceClassification
    config = kind.config_class(
        vocab_size=words.size, n_positions=PLACES, n_embd=12, n_layer=1, n_head=2, num_labels=3, pad_token_id=5,
        bos_token_id=words.start, eos_token_id=words.end,
    )  # fmt: skip
    kind(config).save_pretrained(tmp_path / "theirs")
    words.save(tmp_path / "theirs" / "tokenizer.json")
    convert(tmp_path / "theirs", tmp_path / "run")
    run = regard.load(tmp_path / "run")
    assert run.source.pad == 5
    assert [run.target.decode([number]) for number in (4, 5, 6)] == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert {one.text for one in run.predict(["once"], DecodeConfig(beam=3, num_return=3))[0]} == {
        "LABEL_0",
        "LABEL_1",
        "LABEL_2",
    }
