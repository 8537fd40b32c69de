"""Several models answer together: by the mean of what they hold likely, and under the law."""

import json

import pytest
import torch

import regard
from regard.cli import main
from regard.core import UserError
from regard.data import Tokenizer
from regard.decode import DecodeConfig, Ensemble, Request, greedy
from regard.evaluate import evaluate
from regard.files import recipe
from regard.tasks.run import Run

from .lively import END, SOURCES, VOCAB, WAYS, Lively, LivelyAhead, ask, make, ragged, same
from .uncached import Uncached

TEXTS = ["a cat sat on the mat", "the dog", "cat", "on the mat the dog sat and a cat sat", "dog and cat", "mat"]
TEAMS = {
    "pairs": ("transformer", "seq2seq-luong", "lite-transformer"),
    "texts": ("transformer-decoder", "rwkv4", "transformer-xl"),
}


@pytest.fixture(scope="module", params=TEAMS)
def team(request):
    return Ensemble([make(name) for name in TEAMS[request.param]])


def asked(team: Ensemble, rows: tuple[int, ...] = (0, 1, 2, 3)) -> Request:
    """As each of them is asked; each looks at the source in its own way."""
    request = ask(team.models[0], rows)
    if team.kind != "encoder-decoder":
        return request
    tokens, valid = ragged(SOURCES)
    wide = max(SOURCES[row] for row in rows)
    with torch.no_grad():
        return request._replace(memory=team.encode(tokens[list(rows), :wide], valid[list(rows), :wide]))


@torch.no_grad()
def test_p_is_the_mean_of_theirs(team):
    tokens, valid = ragged((6, 2, 9))
    source = {"source": tokens.flip(0), "source_valid": valid.flip(0)} if team.kind == "encoder-decoder" else {}
    wanted = sum(model(tokens, valid, **source).softmax(-1) for model in team.models) / len(team.models)
    assert len({int(model(tokens, valid, **source)[0, -1].argmax()) for model in team.models}) > 1
    torch.testing.assert_close(team(tokens, valid, **source).exp()[valid], wanted[valid])


@pytest.mark.parametrize("config", WAYS)
def test_the_cache_changes_nothing(team, config):
    request = asked(team)
    cached = WAYS[config](LivelyAhead(team), request, range(4))
    same(cached, WAYS[config](Lively(Uncached(team)), request, range(4)))
    assert len({tuple(answers[0].tokens) for answers in cached}) > 1


@pytest.mark.parametrize("config", WAYS)
def test_a_batch_is_its_sentences_one_by_one(team, config):
    together = WAYS[config](LivelyAhead(team), asked(team), range(4))
    same(together, [WAYS[config](Lively(team), asked(team, (row,)), [row])[0] for row in range(4)])


def test_a_model_with_itself_is_itself():
    model = make("transformer")
    team = Ensemble([model, model])
    request = asked(team)
    alone = greedy(model, request._replace(memory=request.memory.per_model[0]))
    same([[one] for one in greedy(team, request)], [[one] for one in alone])


def test_what_a_shortlist_leaves(team):
    few = torch.tensor([1, 5, END, 11])
    x = torch.randn(3, sum(model.stack.width for model in team.models), dtype=torch.float64)
    parts = zip(team.models, team.split(x), strict=True)
    wanted = sum(model.logits(own)[:, few].softmax(-1) for model, own in parts) / len(team.models)
    torch.testing.assert_close(team.logits_for(few)(x).exp(), wanted)


def test_models_that_do_not_go_together_are_refused():
    with pytest.raises(UserError, match="of one kind"):
        Ensemble([make("transformer"), make("rwkv4")])
    other = regard.build("transformer", "tiny", VOCAB + 1)
    with pytest.raises(UserError, match="same vocabulary"):
        Ensemble([make("transformer"), other])
    with pytest.raises(UserError, match="at least one"):
        Ensemble([])
    two, three = (Ensemble([make("rwkv4")] * n) for n in (2, 3))
    with pytest.raises(UserError, match="a state of 3 models cannot continue with 2"):
        two.step(torch.zeros(1, 1, dtype=torch.long), three.start(1, 4))


def test_as_far_as_all_of_them_reach():
    far, near = (regard.build("gpt2", "tiny", VOCAB, [f"model.embed.position.length={n}"]) for n in (40, 30))
    assert (Ensemble([far, near]).limit, Ensemble([far, far]).limit) == (30, 40)
    assert Ensemble([far, near]).cost(1, 20).state == 2 * far.cost(1, 20).state
    assert Ensemble([make("rwkv4"), make("rwkv4")]).limit is None


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer.train("words", TEXTS)


def team_of_runs(words: Tokenizer, names: tuple[str, ...]) -> list[Run]:
    runs = []
    for number, name in enumerate(names):
        torch.manual_seed(number)
        small = ["model.tie=none", f"model.depth={min(recipe.load(name, 'tiny')['model'].get('depth', 1), 2)}"]
        runs.append(Run(regard.build(name, "tiny", words.size, small).double(), words, words))
    return runs


@torch.no_grad()
def test_loss_is_that_of_the_mean(words):
    runs = team_of_runs(words, ("transformer", "seq2seq-luong"))
    team = Run(Ensemble([run.model for run in runs]), words, words)
    pair = ("the dog sat", "a cat")
    source, target = words.encode_with_special_tokens([pair[0]])[0], [*words.encode([pair[1]])[0], words.end]
    tokens = torch.tensor([[words.start, *target[:-1]]])
    p = sum(run.model(tokens, source=torch.tensor([source])).softmax(-1) for run in runs) / 2
    wanted = -p[0, range(len(target)), target].log().mean()
    assert evaluate(team, [pair], ["loss"])["scores"]["loss"] == pytest.approx(float(wanted), rel=1e-6)


def test_where_all_of_them_looked(words):
    runs = team_of_runs(words, ("transformer", "transformer"))
    team = Run(Ensemble([run.model for run in runs]), words, words)
    config = DecodeConfig(max_new_tokens=5)
    found = team.predict(TEXTS[:2], config, attention=True)
    for text, (answer,) in zip(TEXTS, found, strict=False):
        assert answer.alignment is not None
        rows = torch.tensor(answer.alignment.weights)
        torch.testing.assert_close(rows.sum(1), torch.ones(len(rows)))
        assert rows.shape == (len(answer.tokens) + answer.ended, len(words.encode_with_special_tokens([text])[0]))
    alone = [run.predict(TEXTS[:1], config, attention=True)[0][0].alignment.weights[0] for run in runs]
    mean = torch.tensor(alone).mean(0)
    torch.testing.assert_close(torch.tensor(found[0][0].alignment.weights[0]), mean)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, words):
    place = tmp_path_factory.mktemp("runs")
    for seed, (name, tokenizer) in enumerate(
        (("one", words), ("two", words), ("other", Tokenizer.train("characters", TEXTS)))
    ):
        torch.manual_seed(seed)
        small = ["model.width=12", "model.heads=3", "model.depth=1", "model.tie=none"]
        regard.save(regard.build("transformer", "tiny", tokenizer.size, small), place / name)
        tokenizer.save(place / name / "tokenizer.json")
        (place / name / "run.json").write_text(json.dumps({"tokenizers": [tokenizer.hash()] * 2}))
    return place


def test_runs_answer_together(folders, capsys, tmp_path):
    texts = tmp_path / "texts"
    texts.write_text("the dog\na cat sat\n")
    main(["predict", str(folders / "one"), str(texts), "--ensemble", str(folders / "two"), "--json",
          "--max-new-tokens", "4", "--early-stopping", "never"])  # fmt: skip
    told = [json.loads(line)[0] for line in capsys.readouterr().out.splitlines()]
    wanted = regard.load([folders / "one", folders / "two"]).predict(
        ["the dog", "a cat sat"], DecodeConfig(beam=4, max_new_tokens=4, early_stopping="never")
    )
    assert [one["text"] for one in told] == [answers[0].text for answers in wanted]
    assert [one["score"] for one in told] == pytest.approx([answers[0].score for answers in wanted], rel=1e-5)
    alone = regard.load(folders / "one").predict(["the dog"], DecodeConfig(beam=4, max_new_tokens=4))
    assert alone[0][0].score != pytest.approx(wanted[0][0].score, rel=1e-4)
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("the dog\ta cat\n")
    main(["evaluate", str(folders / "one"), "--ensemble", str(folders / "two"), "--data", str(pairs), "--json"])
    assert json.loads(capsys.readouterr().out)["scores"]["loss"] > 0


def test_runs_that_do_not_go_together_are_refused(folders):
    with pytest.raises(UserError, match=r"other and .*one have tokenizers that differ"):
        regard.load([folders / "one", folders / "other"])
    with pytest.raises(UserError, match="no run folder"):
        regard.load([])
    with pytest.raises(UserError, match="ask it alone"):
        regard.load([folders / "one", folders / "two"]).embed(["a"])
