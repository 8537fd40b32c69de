"""Fine-tuning: what a run takes over from another one, what of it learns how fast, and what does not fit."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file

import regard
from regard.core import UserError
from regard.evaluate import evaluate
from regard.runs import checkpoint
from regard.runs.job import Job
from regard.runs.settings import Settings
from regard.train.job import resume, start
from regard.train.levels import freeze, levels, lr_scales
from regard.train.optimizer import Optimizer
from tests.train.test_killed import run_through, told

ENCODER = [
    "model.width=12", "model.heads=2", "model.depth=3", "model.dropout=0.1", "model.layer.0.feedforward.hidden=20",
    "train.batch_tokens=256", "train.lr=0.01", "train.warmup=5", "train.steps=12",
]  # fmt: skip
STEPS = ["train.steps=6", "train.warmup=2", "train.lr=0.005"]


def quiet(sentence):
    """Nobody listens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A table of words, and whether they begin with a vowel; the same for another question; a text; a run of each."""
    place = tmp_path_factory.mktemp("from")
    rng = random.Random(3)
    words = sorted({"".join(rng.choices("abcdeinou", k=rng.randint(3, 7))) for _ in range(250)})
    tables = {
        "vowels": lambda word: "vowel" if word[0] in "aeiou" else "consonant",
        "lengths": lambda word: ("short", "middle", "long")[(len(word) - 2) // 2],
    }
    for name, label in tables.items():
        text = "text\tlabel\n" + "".join(f"{word}\t{label(word)}\n" for word in words)
        (place / f"{name}.tsv").write_text(text)
    (place / "words.txt").write_text("\n".join(words) + "\n")
    given = {"size": "tiny", "tokenizer": "characters", "dev": "30", "test": "0"}
    given |= {"overrides": ENCODER, "data": str(place / "vowels.tsv")}
    start(Job("transformer-encoder", str(place / "encoder"), **given, as_published=True), quiet).train()
    given |= {
        "overrides": [*ENCODER, "train.context_length=16", "train.batch_tokens=128"],
        "data": str(place / "words.txt"),
    }
    start(
        Job("transformer-decoder", str(place / "decoder"), **given | {"dev": "0.1"}, as_published=True), quiet
    ).train()
    return place


@pytest.fixture
def job(folder, tmp_path):
    def make(run="run", origin="encoder", data="lengths.tsv", overrides=(), **more):
        given = {"recipe": "", "dev": "30", "test": "0", "task": "classify"} | more
        return Job(
            run=str(tmp_path / run), origin=str(folder / origin), data=str(folder / data),
            overrides=[*STEPS, *overrides], **given,
            as_published=True,
        )  # fmt: skip

    return make


def weights(run):
    return load_file(run / "model.safetensors")


def test_the_body_is_taken_over_and_the_head_is_new(job, folder, tmp_path):
    prepared = start(job(), quiet)
    before, now = weights(folder / "encoder"), prepared.model.state_dict()
    body = [name for name in before if not name.startswith("head.")]
    assert body
    assert all(torch.equal(now[name], before[name]) for name in body)
    assert now["head.out.weight"].shape == (3, 12)
    assert before["head.out.weight"].shape == (2, 12)
    assert prepared.task.source.hash() == regard.load(folder / "encoder").source.hash()
    made = prepared.train()
    assert any(not torch.equal(made.model.state_dict()[name], before[name]) for name in body)
    loaded = regard.load(tmp_path / "run")
    assert {best[0].text for best in loaded.predict(["abc", "abcdefg", "abcde"])} <= {"short", "middle", "long"}
    assert loaded.model.recipe["objective"] == {"part": "classify"}
    assert set(evaluate(loaded, prepared.corpus.dev, ["loss", "accuracy"])["scores"]) == {"loss", "accuracy"}


def test_settings_are_for_fine_tuning(job):
    """Where nothing is said: how examples are cut stays as it was, and the rest begins gently."""
    asked = job()
    asked.overrides = ["train.steps=2"]
    settings = start(asked, quiet).settings
    assert (settings.batch_tokens, settings.lr, settings.optimizer, settings.steps) == (256, 5e-5, "adamw", 2)
    asked = job("lora", lora=2)
    asked.overrides = ["train.steps=2"]
    assert start(asked, quiet).settings.lr == 5e-4
    named = job("named", recipe="transformer-encoder")
    named.overrides = ["train.steps=2"]
    assert start(named, quiet).settings.lr == 5e-5


def test_without_a_task_it_goes_on_with_its_own(job, folder, tmp_path):
    """With all its weights, on other data; a language model as well as one that labels."""
    for origin, data, dev in (("encoder", "vowels.tsv", "30"), ("decoder", "words.txt", "0.1")):
        prepared = start(job(origin, origin, data, task=None, dev=dev), quiet)
        before = weights(folder / origin)
        assert all(torch.equal(prepared.model.state_dict()[name], tensor) for name, tensor in before.items())
        prepared.train()
        assert type(regard.load(tmp_path / origin)) is type(regard.load(folder / origin))
        assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(tmp_path / origin).items())
    with pytest.raises(UserError, match="the label 'long' is not among those of the run"):
        start(job("other", task=None), quiet)


def test_a_decoder_labels_by_its_last_token(job, tmp_path):
    prepared = start(job(origin="decoder"), quiet)
    assert prepared.recipe["model"]["head"]["pool"] == "last"
    prepared.train()
    assert regard.load(tmp_path / "run").predict(["abc"])[0][0].text in ("short", "middle", "long")


def test_a_task_without_a_run_to_begin_from(folder, tmp_path):
    """The recipe's head and objective give way."""
    given = {"data": str(folder / "lengths.tsv"), "tokenizer": "characters", "dev": "30", "test": "0"}
    small = [*ENCODER, "train.steps=2", "model.head.pool=max"]
    prepared = start(
        Job("transformer-decoder", str(tmp_path / "run"), "tiny", small, task="classify", **given, as_published=True),
        quiet,
    )
    assert prepared.model.head.pool == "max"
    assert prepared.model.head.classes == 3
    prepared.train()


def test_bert_learns_to_fill_gaps_and_then_to_answer(folder, tmp_path):
    """All its own way: hidden words first, then labels, with its marks; from scratch as well."""
    small = [*ENCODER, "model.head.tokens.hidden=12", "train.context_length=24", "train.steps=2"]
    given = {"data": str(folder / "words.txt"), "dev": "0.1", "test": "0", "tokenizer": "characters"}
    start(Job("bert", str(tmp_path / "bert"), "tiny", small, **given, as_published=True), quiet).train()
    given = {"data": str(folder / "lengths.tsv"), "dev": "30", "test": "0", "task": "classify"}
    prepared = start(
        Job("bert", str(tmp_path / "fine"), None, STEPS, origin=str(tmp_path / "bert"), **given, as_published=True),
        quiet,
    )
    before = weights(tmp_path / "bert")
    assert torch.equal(prepared.model.embed.segment_table, before["embed.segment_table"])
    assert {name for name in prepared.model.state_dict() if name.startswith("head.")} == {
        "head.out.weight",
        "head.out.bias",
    }
    prepared.train()
    assert regard.load(tmp_path / "fine").predict(["abc"])[0][0].text in ("short", "middle", "long")
    small = [*ENCODER, "train.steps=2"]
    start(
        Job("bert", str(tmp_path / "new"), "tiny", small, tokenizer="characters", **given, as_published=True), quiet
    ).train()


def model_of(folder, name="encoder"):
    return regard.load(folder / name).model


def test_levels_and_rates(folder):
    model = model_of(folder)
    heights = {name: level for name, _, level in levels(model)}
    assert heights["embed.table"] == (0, 4)
    assert heights["stack.layers.0.branches.mixer.q.weight"] == (1, 3)
    assert heights["stack.layers.2.branches.mixer.q.weight"] == (3, 1)
    assert heights["stack.norm.inner.weight"] == heights["head.out.weight"] == (4, 0)
    found = lr_scales(model, 0.5, 3.0)
    assert found["embed.table"] == 0.5**4
    assert found["stack.layers.0.branches.mixer.q.weight"] == 0.5**3
    assert found["stack.layers.2.branches.mixer.q.weight"] == 0.5
    assert found["stack.norm.inner.weight"] == 1.0
    assert found["head.out.bias"] == 3.0
    assert set(lr_scales(model, 1.0, 1.0).values()) == {1.0}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon", "adafactor"])
def test_every_layer_moves_at_its_own_rate(folder, optimizer):
    """One step with gradients of one moves a weight as far as its share of the rate says."""
    moved = []
    for decay, head in ((1.0, 1.0), (0.5, 4.0)):
        model = model_of(folder)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        settings = Settings(optimizer=optimizer, lr=0.01, layer_decay=decay, head_lr=head, max_grad_norm=0.0, steps=1)
        made = Optimizer(model, settings)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        made.step(0.01, 1.0)
        moved.append({name: (p.detach() - before[name]).abs().mean() for name, p in model.named_parameters()})
    wanted = lr_scales(model, 0.5, 4.0)
    for name, far in moved[1].items():
        torch.testing.assert_close(far, moved[0][name] * wanted[name], rtol=1e-2, atol=1e-6)


def learning(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def test_what_is_frozen(folder):
    every = learning(model_of(folder))
    for most, free in (
        (0, every),
        ("embed", {name for name in every if not name.startswith("embed.")}),
        (2, {name for name in every if name.startswith(("stack.layers.2.", "stack.norm.", "head."))}),
        (3, {name for name in every if name.startswith(("stack.norm.", "head."))}),
        ("body", {name for name in every if name.startswith("head.")}),
    ):
        model = model_of(folder)
        freeze(model, most)
        assert learning(model) == free, most
    with pytest.raises(UserError, match=r"train.freeze is 4, and this model has 3 layers: say body"):
        freeze(model_of(folder), 4)
    recipe = json.loads(json.dumps(model_of(folder).recipe))
    recipe["model"]["share"] = "layers"
    with pytest.raises(UserError, match="layers of this model share weights"):
        freeze(regard.build(recipe), 1)
    tied = model_of(folder, "decoder")
    freeze(tied, "body")
    if learning(tied):
        assert all(name.startswith("head.") for name in learning(tied))
    else:
        with pytest.raises(UserError, match="no parameter is left to train"):
            Optimizer(tied, Settings(steps=1))


LM = {"origin": "decoder", "data": "words.txt", "dev": "0.1", "task": None}
SLOW = [
    {"overrides": ["train.freeze=2"]},
    {"overrides": ["train.freeze=body"]},
    {"lora": 3},
    {"lora": 2, "task": None, "data": "vowels.tsv"},
    {"lora": 2, **LM},
    {"overrides": ["train.freeze=1", "train.gradient_checkpointing=true"], **LM},
]


@pytest.mark.parametrize("given", SLOW, ids=[",".join(given) for given in SLOW])
def test_what_does_not_learn_stays_and_costs_nothing(job, folder, tmp_path, given):
    """Neither a gradient nor a place in the optimizer; and the folder loads as it was."""
    prepared = start(job(**given), quiet)
    free = learning(prepared.model)
    names = {name for name, _ in prepared.model.named_parameters()}
    assert 0 < len(free) < len(names)
    prepared.train()
    before, now = weights(folder / given.get("origin", "encoder")), weights(tmp_path / "run")
    held = [name for name in before if name in now and name not in free and not name.startswith("head.")]
    assert held
    assert all(torch.equal(now[name], before[name]) for name in held)
    assert set(prepared.trainer.learner.optimizer.names.values()) == free
    state = {name.rpartition("/")[0] for name in prepared.trainer.learner.optimizer.state()}
    assert state == free
    assert all(p.grad is None for p in prepared.model.parameters() if not p.requires_grad)
    loaded = regard.load(tmp_path / "run")
    texts = ["abc", "abcde", "uoi"]
    made = prepared.task.make_predictor(prepared.model, None, prepared.corpus.train.documents)
    assert [best[0].score for best in loaded.predict(texts)] == [best[0].score for best in made.predict(texts)]


def test_lora_goes_on_and_is_merged(job, folder, tmp_path):
    start(job("one", lora=2), quiet).train()
    again = Job("", str(tmp_path / "two"), None, STEPS, str(folder / "lengths.tsv"), dev="30", test="0",
                origin=str(tmp_path / "one"), as_published=True)  # fmt: skip
    prepared = start(again, quiet)
    mine = prepared.model.state_dict()
    assert all(torch.equal(mine[name], tensor) for name, tensor in weights(tmp_path / "one").items())
    prepared.train()
    again.run, again.lora = str(tmp_path / "three"), 2
    with pytest.raises(UserError, match="merge them first"):
        start(again, quiet)
    from regard.passes.lora import merge_run

    merge_run(tmp_path / "two", tmp_path / "plain")
    texts = ["abc", "abcde", "uoi"]
    one, two = regard.load(tmp_path / "two"), regard.load(tmp_path / "plain")
    scores = [[best[0].score for best in run.predict(texts)] for run in (one, two)]
    torch.testing.assert_close(*map(torch.tensor, scores), rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="begin a new run with --from"):  # there is no checkpoint of it
        resume(tmp_path / "plain", {"steps": 9}, quiet)
    again.run, again.origin = str(tmp_path / "four"), str(tmp_path / "plain")
    assert start(again, quiet).train()


def test_an_unfinished_run_and_one_that_was_converted(job, folder, tmp_path):
    """The newest checkpoint serves; a table larger than the tokenizer stays as it is."""
    half = tmp_path / "half"
    start(job("half", overrides=["train.save_steps=2"]), quiet).train()
    (half / "model.safetensors").unlink()
    given = Job(
        "",
        str(tmp_path / "on"),
        None,
        STEPS,
        str(folder / "lengths.tsv"),
        dev="30",
        test="0",
        origin=str(half),
        as_published=True,
    )
    path, _, _ = checkpoint.newest(half / "checkpoints")
    mine = start(given, quiet).model.state_dict()
    assert all(torch.equal(mine[name], tensor) for name, tensor in load_file(path / "model.safetensors").items())

    foreign = tmp_path / "foreign"
    base = regard.load(folder / "encoder")
    recipe = base.model.recipe | {"vocab": base.source.size + 5}
    regard.save(regard.build(recipe), foreign)
    base.source.save(foreign / "tokenizer.json")
    marks = {"pad": base.source.pad, "unk": base.source.unk, "start": base.source.start, "end": base.source.end}
    (foreign / "run.json").write_text(json.dumps({"origin": {"family": "bert"}, "marks": marks, "documents": True}))
    start(Job("", str(tmp_path / "fine"), None, STEPS, str(folder / "lengths.tsv"), dev="30", test="0",
              origin=str(foreign), task="classify", as_published=True), quiet).train()  # fmt: skip
    loaded = regard.load(tmp_path / "fine")
    assert len(loaded.model.embed.table) == base.source.size + 5
    assert loaded.predict(["abc"])[0][0].text in ("short", "middle", "long")
    assert resume(tmp_path / "fine", {"steps": 8}, quiet).train()


def test_killed_again_and_again(job, tmp_path):
    """From another run, with frozen layers and small maps: to the same end as one that was never killed."""
    given = {"lora": 2, "overrides": ["train.steps=24", "train.save_steps=3", "train.eval_steps=5", "train.freeze=1",
                                      "train.layer_decay=0.8", "train.ema=0.9"]}  # fmt: skip
    run_through(job("whole", **given), 0, tmp_path)
    killed = run_through(job("killed", **given), 7, tmp_path)
    assert sum(killed.values()) >= 5
    whole, again = tmp_path / "whole", tmp_path / "killed"
    assert (whole / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert told(again) == told(whole)


def test_killed_before_the_first_checkpoint(job, tmp_path):
    """The weights of the other run are taken once more."""
    whole = start(job("whole"), quiet)
    whole.train()
    start(job("again"), quiet)  # and nothing after that
    again = resume(tmp_path / "again", None, quiet)
    again.train()
    wanted = whole.model.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in again.model.state_dict().items())


REFUSED = [
    ({"task": "clasify"}, "unknown task 'clasify'; did you mean 'classify'"),
    ({"origin": "nowhere"}, "there is no run folder"),
    ({"origin": "."}, "is not a run folder"),
    ({"size": "tiny"}, "leave out --size"),
    ({"tokenizer": "bpe"}, "leave out --tokenizer"),
    ({"vocab": 300}, "leave out --vocab"),
    ({"lowercase": True}, "leave out --lowercase"),
    ({"origin": "decoder", "task": "tag"}, "needs an encoder"),
    ({"recipe": "transformer-decoder"}, "holds another model than 'transformer-decoder'"),
    ({"recipe": "transformer"}, "holds another model than 'transformer'"),
    ({"overrides": ["model.width=14"]}, r"embed.table is \(13, 12\) in .*encoder and \(13, 14\) here"),
    ({"overrides": ["model.depth=4"]}, "has no 'stack.layers.3"),
    ({"overrides": ["model.depth=2"]}, "has 'stack.layers.2.*, which this model does not have"),
    ({"overrides": ["train.freeze=7"]}, "this model has 3 layers"),
    ({"overrides": ["train.freeze=body"], "lora": 2}, "freezes all LoRA matrices"),
    ({"overrides": ["train.freeze=3"], "lora": 2}, "freezes all LoRA matrices"),
    ({"overrides": ["train.freeze=heads"]}, "train.freeze 'heads' is unknown"),
    ({"overrides": ["train.layer_decay=0"]}, "layer_decay must be above 0"),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_refused(job, tmp_path, given, sentence):
    with pytest.raises(UserError, match=sentence):
        start(job(**given), quiet)
    assert not (tmp_path / "run" / "run.json").exists()


def test_refused_without_a_run(folder, tmp_path):
    for recipe, given, sentence in (
        ("transformer-encoder", {"lora": 3}, "name one with --from"),
        ("transformer", {"task": "classify"}, "this model is an encoder-decoder"),
    ):
        with pytest.raises(UserError, match=sentence):
            start(
                Job(recipe, str(tmp_path / "run"), data=str(folder / "lengths.tsv"), **given, as_published=True), quiet
            )


def test_what_cannot_be_gone_on_with(job, folder, tmp_path):
    """Such as sentence vectors: they need a task."""
    vectors = tmp_path / "vectors"
    vectors.mkdir()
    for path in (folder / "encoder").glob("*.*"):
        (vectors / path.name).write_bytes(path.read_bytes())
    recipe = (vectors / "recipe.toml").read_text()
    (vectors / "recipe.toml").write_text(
        recipe.replace('[objective]\npart = "classify"', '[objective]\npart = "vectors"')
    )
    with pytest.raises(UserError, match="has learned 'vectors', and cannot go on with that: say --task"):
        start(job(origin=str(vectors), task=None), quiet)
    assert start(job(origin=str(vectors)), quiet).model.head.classes == 3


def test_no_tokenizer_no_texts(job, folder, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("recipe.toml", "model.safetensors", "run.json"):
        (bare / name).write_bytes((folder / "encoder" / name).read_bytes())
    with pytest.raises(UserError, match="has no tokenizer"):
        start(job(origin=str(bare)), quiet)
    for name in ("source.tokenizer.json", "target.tokenizer.json"):
        (bare / name).write_bytes((folder / "encoder" / name).read_bytes())
    (bare / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="cannot be read"):
        start(job(origin=str(bare)), quiet)
    (bare / "model.safetensors").unlink()
    with pytest.raises(UserError, match="holds no model yet"):
        start(job(origin=str(bare)), quiet)
