"""ViT and CLIP against `transformers` with random weights: outputs, gradients, several configs."""

import json

import numpy as np
import pytest
import tokenizers
import torch
from PIL import Image
from tokenizers import models, pre_tokenizers, processors
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer, ViTConfig, ViTForImageClassification, ViTModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

import regard
from regard.cli import main
from regard.convert import convert
from regard.convert.family import every_family, family_of
from regard.convert.tokens import _inner
from regard.core import Context, UserError
from regard.runs.job import Job
from regard.train.job import start
from tests.convert.live import agree, mask, near, randomise, twins

VIT = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 36, "patch_size": 4}
VITS = {
    "plain": {"image_size": 12, "num_labels": 5},
    "oblong": {"image_size": [8, 20], "num_labels": 7, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3},
    "without bias": {"image_size": 8, "num_channels": 1, "qkv_bias": False, "num_labels": 3},
    "two labels": {"image_size": 8, "patch_size": 2, "num_attention_heads": 1, "intermediate_size": 10},
}


def images(config, batch=3) -> torch.Tensor:
    sides = [config.image_size] * 2 if isinstance(config.image_size, int) else config.image_size
    return torch.randn(batch, config.num_channels, *sides, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", VITS)
def test_vit_labels(name):
    pair = twins(ViTForImageClassification(ViTConfig(**VIT | VITS[name])))
    given = images(pair.theirs.config)
    agree(pair, [pair.ours(given)], [pair.theirs(given).logits])


@pytest.mark.parametrize("more", [{}, {"pooler_output_size": 10, "pooler_act": "relu"}])
def test_vit_with_a_pooler(more):
    pair = twins(ViTModel(ViTConfig(**VIT, image_size=8, **more)))
    given = images(pair.theirs.config)
    context = Context.begin(len(given), pair.ours.embed.count)
    hidden = pair.ours.hidden(given, context)
    want = pair.theirs(given)
    assert torch.equal(pair.ours(given), hidden)
    agree(pair, [hidden, pair.ours.head.vector(hidden, context)], [want.last_hidden_state, want.pooler_output])


def test_vit_without_a_pooler():
    """config.json does not say it, the tensors do."""
    theirs = ViTModel(ViTConfig(**VIT, image_size=8), add_pooling_layer=False)
    pair = twins(theirs)
    given = images(theirs.config)
    agree(pair, [pair.ours(given)], [theirs(given).last_hidden_state])


def test_vit_by_its_old_names():
    """As checkpoints have them: renamed, every tensor finds its place."""
    pair = twins(ViTForImageClassification(ViTConfig(**VIT, image_size=8)))
    old = [rule.theirs for rule in pair.family.rules(pair.config, ())]
    assert "vit.encoder.layer.1.attention.attention.query.weight" in old
    renamed = list(pair.family.rules(pair.config, old))
    assert [rule.theirs for rule in renamed] == old
    assert [rule.ours for rule in renamed] == [rule.ours for rule in pair.rules]


def test_vit_patches_are_square():
    with pytest.raises(UserError, match="only square patches"):
        every_family()["vit"].recipe(every_family()["vit"].complete({"patch_size": [4, 2]}))
    assert (
        every_family()["vit"].recipe(every_family()["vit"].complete({"patch_size": [4, 4]}))["model"]["embed"]["patch"]
        == 4
    )


TEXT = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3,
        "max_position_embeddings": 13, "eos_token_id": 37}  # fmt: skip
VISION = {"hidden_size": 30, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 5,
          "image_size": 12, "patch_size": 4}  # fmt: skip
CLIPS = {
    "plain": ({}, {}, {}),
    "other bends": ({"hidden_act": "gelu", "layer_norm_eps": 1e-3}, {"hidden_act": "gelu_new"}, {"projection_dim": 7}),
    "old end": ({"eos_token_id": 2}, {"num_channels": 1}, {"logit_scale_init_value": 1.5}),
    "one head": ({"num_attention_heads": 1}, {"num_hidden_layers": 3, "layer_norm_eps": 1e-4}, {}),
}


@pytest.mark.parametrize("name", CLIPS)
def test_clip(name):
    text, vision, more = CLIPS[name]
    pair = twins(CLIPModel(CLIPConfig(text_config=TEXT | text, vision_config=VISION | vision, **more)))
    valid = mask([11, 4, 9, 7])
    tokens = torch.randint(3, 36, (4, 11), generator=torch.Generator().manual_seed(3))
    tokens[torch.arange(4), valid.sum(1) - 1] = 37
    tokens = tokens.masked_fill(~valid, 37 if name == "plain" else 1)  # padded with the end itself, as OpenAI does
    given = images(pair.theirs.config.vision_config)
    want = pair.theirs(tokens, given, valid.long(), return_loss=False)
    near(pair.ours.encode_images(given), want.image_embeds, "images")
    near(pair.ours.encode_texts(tokens, valid), want.text_embeds, "texts")
    near(pair.ours.encode_texts(tokens), want.text_embeds, "texts, ended by the end token alone")
    agree(pair, [pair.ours(given, tokens, valid)], [want.logits_per_image], limit=2e-5)


def test_clip_reads_a_text_without_an_end_as_they_do():
    pair = twins(CLIPModel(CLIPConfig(text_config=TEXT, vision_config=VISION)))
    tokens = torch.randint(3, 36, (2, 6), generator=torch.Generator().manual_seed(3))
    want = torch.nn.functional.normalize(pair.theirs.get_text_features(tokens).pooler_output, dim=-1)
    near(pair.ours.encode_texts(tokens), want)


def test_clip_with_each_table_twice():
    """Old configs: what is said in text_config_dict counts, its defaults, too."""
    told = {"model_type": "clip", "text_config": {"hidden_size": 64, "vocab_size": 99}, "vision_config": None,
            "text_config_dict": {"hidden_size": 48}, "vision_config_dict": None}  # fmt: skip
    family = family_of(told)
    whole, theirs = family.complete(told), CLIPConfig(**told)
    assert whole["text_config"]["hidden_size"] == theirs.text_config.hidden_size == 48
    assert whole["text_config"]["vocab_size"] == theirs.text_config.vocab_size == 49408
    assert whole["vision_config"]["hidden_size"] == 768
    with pytest.raises(UserError, match="eos_token_id"):
        family.complete({"text_config": {"eos_token_id": [1, 3]}})


@pytest.fixture
def pictures(tmp_path):
    rng = np.random.default_rng(1)
    paths = [tmp_path / f"{name}.png" for name in "abc"]
    for number, path in enumerate(paths):
        noise = rng.integers(0, 255, (20 + number, 31, 3)).astype(np.uint8)
        Image.fromarray(noise).resize((31 + number, 20)).save(path)
    return paths


@torch.no_grad()
def test_a_vit_from_elsewhere_labels_pictures(pictures, tmp_path, capsys):
    names = {0: "cat", 1: "dog", 2: "newt"}
    config = ViTConfig(**VIT, image_size=12, id2label=names, label2id={v: k for k, v in names.items()})
    theirs = randomise(ViTForImageClassification(config).eval())
    processor = ViTImageProcessorPil(size={"height": 12, "width": 12}, image_mean=[0.3, 0.4, 0.5])
    theirs.save_pretrained(tmp_path / "theirs")
    processor.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "run")
    given = processor([Image.open(path) for path in pictures], return_tensors="pt")
    want = theirs(**given).logits.log_softmax(-1)
    assert main(["predict", str(tmp_path / "run"), *map(str, pictures), "--num-return", "3", "--json"]) == 0
    for line, logs in zip(capsys.readouterr().out.splitlines(), want, strict=True):
        answers = json.loads(line)["answers"]
        assert [one["text"] for one in answers] == [names[n] for n in logs.argsort(descending=True).tolist()]
        assert [one["logprob"] for one in answers] == pytest.approx(sorted(logs.tolist(), reverse=True), rel=1e-4)
    vectors = regard.load(tmp_path / "run").vectors(pictures)
    near(vectors, theirs.vit(**given).last_hidden_state[:, 0])
    convert(tmp_path / "run", tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["id2label"]["2"] == "newt"
    assert (tmp_path / "again" / "preprocessor_config.json").is_file()


def clip_tokenizer() -> tokenizers.Tokenizer:
    words = ["<|startoftext|>", "<|endoftext|>", *"abcdefgh"]
    inner = tokenizers.Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<|endoftext|>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(
        single="<|startoftext|> $A <|endoftext|>", special_tokens=[("<|startoftext|>", 0), ("<|endoftext|>", 1)]
    )
    return inner


@torch.no_grad()
def test_a_clip_from_elsewhere_matches(pictures, tmp_path, capsys):
    text = TEXT | {"vocab_size": 12, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 1}
    theirs = randomise(CLIPModel(CLIPConfig(text_config=text, vision_config=VISION)).eval())
    processor = CLIPImageProcessorPil(size={"shortest_edge": 14}, crop_size={"height": 12, "width": 12})
    theirs.save_pretrained(tmp_path / "theirs")
    processor.save_pretrained(tmp_path / "theirs")
    clip_tokenizer().save(str(tmp_path / "theirs" / "tokenizer.json"))
    convert(tmp_path / "theirs", tmp_path / "run")
    given = processor([Image.open(path) for path in pictures], return_tensors="pt")
    texts = ["a b c d", "h", "g e a"]
    tokens = torch.tensor([[0, 2, 3, 4, 5, 1], [0, 9, 1, 1, 1, 1], [0, 8, 6, 2, 1, 1]])
    want = theirs(tokens, given.pixel_values, torch.tensor([[1] * 6, [1] * 3 + [0] * 3, [1] * 5 + [0]]))
    run = regard.load(tmp_path / "run")
    near(run.match(pictures, texts), want.logits_per_image.softmax(-1))
    near(run.vectors(pictures), want.image_embeds)
    near(run.embed(texts), want.text_embeds)
    asked = [word for one in texts for word in ("--text", one)]
    assert main(["predict", str(tmp_path / "run"), *map(str, pictures), *asked, "--num-return", "1"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    best = want.logits_per_image.argmax(1).tolist()
    assert [line[:2] for line in lines] == [[str(path), texts[n]] for path, n in zip(pictures, best, strict=True)]
    assert [float(line[2]) for line in lines] == pytest.approx(want.logits_per_image.softmax(-1).amax(1), abs=1e-3)


def test_a_vit_trained_here_goes_out(tmp_path):
    """With the names of its labels, and with how it wants its pictures."""
    rng = np.random.default_rng(1)
    np.savez(tmp_path / "a.npz", images=rng.integers(0, 255, (20, 8, 8, 3)).astype(np.uint8),
             labels=np.arange(20) % 2, names=np.array(["no", "yes"]))  # fmt: skip
    small = [
        "model.depth=1",
        "model.width=12",
        "model.heads=3",
        "model.embed.image=8",
        "train.steps=1",
        "train.batch_size=4",
    ]
    job = Job(
        "vit", str(tmp_path / "run"), "tiny", small, str(tmp_path / "a.npz"), dev="0", test="0", as_published=True
    )
    ours = start(job, say=lambda sentence: None).train()
    convert(tmp_path / "run", tmp_path / "out")
    theirs = ViTForImageClassification.from_pretrained(tmp_path / "out").eval()
    assert theirs.config.id2label == {0: "no", 1: "yes"}
    image = Image.fromarray(rng.integers(0, 255, (13, 9, 3)).astype(np.uint8))
    image.save(tmp_path / "a.png")
    given = ViTImageProcessorPil.from_pretrained(tmp_path / "out")(image, return_tensors="pt")
    answer = ours.predict([tmp_path / "a.png"])[0][0]
    logs = theirs(**given).logits.log_softmax(-1)[0].detach()
    assert answer.text == theirs.config.id2label[int(logs.argmax())]
    assert answer.logprob == pytest.approx(float(logs.max()), rel=1e-4)


def test_a_clip_tokenizer_in_its_old_form(tmp_path):
    """vocab.json and merges.txt, in which pieces say that they end a word."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("c", "a"), ("ca", "t</w>"), ("d", "o"), ("do", "g</w>"), ("'", "s</w>"), ("1", "2</w>"), ("!", "!</w>")]
    pieces = [*letters, *(f"{one}</w>" for one in letters), *("".join(pair) for pair in merges)]
    vocab = {piece: number for number, piece in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])}
    theirs = CLIPTokenizer(vocab=vocab, merges=merges)
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in merges)]) + "\n")
    (inner,) = _inner(tmp_path, {}, "clip")
    for text in ("a cat", "The  CAT's\tdog!!", "12 dogs, cats", "", "caf\u00e9 cafe\u0301 \u6f22 \U0001f600", "ca do"):
        assert inner.encode(text).ids == theirs(text).input_ids, text
    assert inner.encode("cat dog").ids == [
        vocab[name] for name in ("<|startoftext|>", "cat</w>", "dog</w>", "<|endoftext|>")
    ]
