"""A folder in the Hugging Face layout, converted: its answers are those of `transformers`' own generate."""

import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

import regard
from regard.convert import convert
from regard.decode import DecodeConfig
from regard.tasks.spans import SpanFiller

from .live import randomise

WORDS = [f"w{i}" for i in range(17)]
TEXTS = ["w3 w11 w8", "w1 w16 w2 w9 w4 w4 w12", "w7", "w15 w0 w10 w5 w13"]
MOST = 9
T5 = {"d_model": 24, "d_kv": 7, "d_ff": 30, "num_layers": 2, "num_heads": 3}
SIDES = {"d_model": 24, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 3, "encoder_ffn_dim": 20,
         "decoder_attention_heads": 4, "decoder_ffn_dim": 28, "max_position_embeddings": 40}  # fmt: skip

# For which some answers end and others do not.
DRAWN = {"T5": (0.7, 4), "T5 v1.1": (0.35, 5), "Marian": (0.35, 1), "BART": (0.35, 4)}

# Class, what stands before the words in the vocabulary and after them, the template of a source, the config.
MODELS = {
    "T5": (transformers.T5ForConditionalGeneration, ["<pad>", "</s>", "<unk>"], [], "$A </s>",
           T5 | {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}),
    "T5 v1.1": (transformers.T5ForConditionalGeneration, ["<pad>", "</s>", "<unk>"], [], "$A </s>",
                T5 | {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
                      "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "T5 with sentinels": (
        transformers.T5ForConditionalGeneration, ["<pad>", "</s>", "<unk>"], ["<extra_id_1>", "<extra_id_0>"],
        "$A </s>", T5 | {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
    ),
    "Marian": (transformers.MarianMTModel, ["</s>", "<unk>"], ["<pad>"], "$A </s>",
               SIDES | {"pad_token_id": 19, "eos_token_id": 0, "decoder_start_token_id": 19, "scale_embedding": True,
                        "activation_function": "swish", "forced_eos_token_id": None}),
    "BART": (transformers.BartForConditionalGeneration, ["<s>", "<pad>", "</s>", "<unk>"], [], "<s> $A </s>",
             SIDES | {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0, "decoder_start_token_id": 2,
                      "forced_bos_token_id": 0, "forced_eos_token_id": None}),
}  # fmt: skip


def made(name, tmp_path):
    """Theirs, their tokenizer, and the folder."""
    kind, before, after, template, config = MODELS[name]
    names = [*before, *WORDS, *after]
    numbers = {name: i for i, name in enumerate(names)}
    inner = tokenizers.Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.add_special_tokens([*before, *after])
    marks = [(name, numbers[name]) for name in ("<s>", "</s>") if name in numbers]
    inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=marks)
    torch.manual_seed(0)
    theirs = randomise(kind(kind.config_class(vocab_size=len(names), **config)), *DRAWN.get(name, (0.35, 1)))
    theirs.generation_config.forced_bos_token_id = config.get("forced_bos_token_id")
    with torch.no_grad():  # so that some answers end
        theirs.lm_head.weight[config["eos_token_id"]] *= 2.5
    theirs.eval().save_pretrained(tmp_path / "theirs")
    inner.save(str(tmp_path / "theirs" / "tokenizer.json"))
    return kind.from_pretrained(tmp_path / "theirs").eval(), inner, tmp_path  # sinusoids are not saved, but made anew


def generated(theirs, inner, **how) -> list[list[int]]:
    """Without start, forced first and end marks."""
    rows = [one.ids for one in inner.encode_batch(TEXTS)]
    longest, config = max(map(len, rows)), theirs.config
    ids = torch.tensor([[*row, *[config.pad_token_id] * (longest - len(row))] for row in rows])
    mask = torch.arange(longest)[None] < torch.tensor([[len(row)] for row in rows])
    found = theirs.generate(input_ids=ids, attention_mask=mask.long(), max_new_tokens=MOST, **how)
    first = 2 if theirs.generation_config.forced_bos_token_id is not None else 1
    answers = []
    for row in found.tolist():
        said = row[first:]
        answers.append(said[: said.index(config.eos_token_id)] if config.eos_token_id in said else said)
    return answers


def answered(run, inner, config) -> list[list[int]]:
    return [[inner.token_to_id(token) for token in answers[0].tokens] for answers in run.predict(TEXTS, config)]


def test_what_comes_first_counts(tmp_path, monkeypatch):
    """Of two answers, the longer one would win if the forced first token were not counted."""
    monkeypatch.setitem(DRAWN, "BART", (0.35, 6))
    theirs, inner, folder = made("BART", tmp_path)
    convert(folder / "theirs", folder / "run")
    want = generated(theirs, inner, num_beams=2, do_sample=False, early_stopping=True)
    assert answered(regard.load(folder / "run"), inner, DecodeConfig(beam=2, max_new_tokens=MOST - 1)) == want


@pytest.mark.parametrize("name", DRAWN)
def test_the_answers_are_theirs(name, tmp_path):
    theirs, inner, folder = made(name, tmp_path)
    convert(folder / "theirs", folder / "run")
    run = regard.load(folder / "run")
    most = MOST - (theirs.generation_config.forced_bos_token_id is not None)
    want = generated(theirs, inner, num_beams=1, do_sample=False)
    assert answered(run, inner, DecodeConfig(max_new_tokens=most)) == want
    assert len({len(answer) for answer in want}) > 1, "some end, some do not"
    for size in (2, 4):
        want = generated(theirs, inner, num_beams=size, do_sample=False, early_stopping=True)
        assert answered(run, inner, DecodeConfig(beam=size, max_new_tokens=most)) == want


def test_sentinels_in_a_text_are_read(tmp_path):
    """They are marks in such a tokenizer, and marks in other texts are text."""
    _, inner, folder = made("T5 with sentinels", tmp_path)
    convert(folder / "theirs", folder / "run")
    run = regard.load(folder / "run")
    assert type(run) is SpanFiller
    text = "w3 <extra_id_0> w8 <extra_id_1>"
    assert run.encode_inputs([text], run.config)[0].ids == inner.encode(text).ids == [6, 21, 11, 20, 1]
    assert 1 not in run.encode_inputs(["w3 </s> w8"], run.config)[0].ids[:-1]
    (answer,) = run.predict([text], DecodeConfig(max_new_tokens=MOST))[0]
    assert answer.text.split()[0] == "w3"
    assert "extra_id" not in answer.text
    assert (run.reads, "bleu" in run.metrics) == ("pairs", True)


def test_what_is_never_said(tmp_path):
    """The scores of Marian's padding mean nothing, and its generation_config.json says so."""
    theirs, inner, folder = made("Marian", tmp_path)
    with torch.no_grad():
        theirs.lm_head.weight[19] *= 30
    theirs.generation_config.bad_words_ids = [[19]]
    theirs.save_pretrained(folder / "theirs")
    convert(folder / "theirs", folder / "run")
    run, most = regard.load(folder / "run"), MOST
    assert run.target.suppressed == [19]
    found = answered(run, inner, DecodeConfig(max_new_tokens=most))
    assert found == generated(theirs, inner, num_beams=1, do_sample=False)
    run.target.suppressed = []
    assert any(19 in answer for answer in answered(run, inner, DecodeConfig(max_new_tokens=most)))
