"""Runs: predictions in order and in batches, alignments, streaming, loading, and bad input."""

import copy
import json
import multiprocessing
import os
import subprocess
import sys
import threading

import pytest
import torch

import regard
from regard.core import Model, UserError, select, watch
from regard.data import Tokenizer
from regard.decode import DecodeConfig, Request, greedy
from regard.decode.config import DEFAULT_SAMPLING
from regard.decode.sample import NewTokens
from regard.files import recipe
from regard.runs import checkpoint
from regard.tasks.load import load
from regard.tasks.run import EncodedInput, Run

TEXTS = ["a cat sat on the mat", "the dog", "", "cat", "on the mat the dog sat and a cat sat", "dog and cat", "mat"]
KINDS = {name: (recipe.load(name)["model"]["kind"], recipe.load(name)["objective"]["part"]) for name in recipe.names()}
PAIRS = [name for name, kind in KINDS.items() if kind == ("encoder-decoder", "next_token")]
HOW = {
    "greedy": DecodeConfig(max_new_tokens=9),
    "sampling": DecodeConfig(temperature=1.2, top_k=12, seed=3, max_new_tokens=9),
    "beam": DecodeConfig(beam=3, num_return=2, max_new_tokens=9),
}


def make(name: str, tokenizer: Tokenizer, overrides: tuple[str, ...] = (), size: str = "tiny") -> Model:
    """Build a model in float64, where a batch equals its rows, with large random weights."""
    torch.manual_seed(7)
    small = ["model.tie=none", f"model.depth={min(recipe.load(name, size)['model'].get('depth', 1), 2)}"]
    model = regard.build(name, size=size, vocab=tokenizer.size, overrides=[*small, *overrides]).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)
    return model


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer.train("words", TEXTS)


@pytest.fixture(scope="module")
def translator(words) -> Run:
    return Run(make("transformer", words), words, words)


@pytest.fixture(scope="module")
def writer(words) -> Run:
    return Run(make("transformer-decoder", words), words, words)


def close(one, two) -> None:
    """Check that predictions are equal, numbers up to rounding."""
    assert [(a.text, a.tokens, a.ended, a.cut) for a in one] == [(b.text, b.tokens, b.ended, b.cut) for b in two]
    assert [(a.score, a.logprob) for a in one] == [pytest.approx((b.score, b.logprob), rel=1e-5) for b in two]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("which", ["translator", "writer"])
def test_a_batch_is_its_texts_one_by_one_and_in_order(which, how, request):
    run = request.getfixturevalue(which)
    together = run.predict(TEXTS, HOW[how])
    assert len(together) == len(TEXTS)
    assert len({answers[0].text for answers in together}) > 2
    for text, answers in zip(TEXTS, together, strict=True):
        close(answers, run.predict([text], HOW[how])[0])
        assert len(answers) == HOW[how].num_return


def test_batches_are_of_about_equal_length_and_within_the_budget(translator):
    config = DecodeConfig(beam=2, max_batch_tokens=200)
    coded = translator.encode_inputs(TEXTS * 5, config)
    batches = translator._batches(coded, config, 1)
    assert sorted(row for rows in batches for row in rows) == list(range(35))
    assert len(batches) > 3
    lengths = [[len(coded[row].ids) for row in rows] for rows in batches]
    assert [length for rows in lengths for length in rows] == sorted((len(one.ids) for one in coded), reverse=True)
    for rows in lengths:
        assert len(rows) == 1 or 2 * len(rows) * (max(rows) + 2 * max(rows) + 20) <= 200
    small, large = (
        translator.predict(TEXTS, DecodeConfig(beam=2, max_new_tokens=9, max_batch_tokens=n)) for n in (1, 100_000)
    )
    for one, two in zip(small, large, strict=True):
        close(one, two)


def test_without_a_budget_states_decide(translator, monkeypatch):
    config = DecodeConfig(beam=2, max_new_tokens=9)
    coded = translator.encode_inputs(TEXTS * 5, config)
    assert [len(rows) for rows in translator._batches(coded, config, 1)] == [35]
    assert [len(rows) for rows in translator._batches(coded, config, 2)] == [18, 17]
    longest = translator.model.cost(1, max(len(one.ids) for one in coded) + 9 - 1).state
    monkeypatch.setattr("regard.tasks.run.MAX_STATE_BYTES", 2 * 4 * longest)
    sizes = [len(rows) for rows in translator._batches(coded, config, 1)]
    assert sizes[0] == 4
    assert sizes[-2] > 4
    monkeypatch.setattr("regard.tasks.run.MAX_ROWS", 6)
    assert max(len(rows) for rows in translator._batches(coded, config, 1)) == 3


@pytest.mark.parametrize("by", ["forks", "threads"])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("which", ["translator", "writer"])
def test_several_batches_at_once(which, how, by, request, monkeypatch, tmp_path):
    """With workers, answers keep their order and torch its number of threads."""
    run = request.getfixturevalue(which)
    alone = run.predict(TEXTS * 3, HOW[how])
    log, answer = tmp_path / "log", Run._answer

    def answers(*given):
        with log.open("a") as file:
            file.write(f"{os.getpid()} {threading.get_ident()}\n")
        return answer(*given)

    monkeypatch.setattr("regard.tasks.run.ROWS_PER_WORKER", 2)
    monkeypatch.setattr("regard.tasks.run.MAX_ROWS", 6)
    monkeypatch.setattr(Run, "_answer", answers)
    if by == "threads":
        monkeypatch.setattr("regard.tasks.run.forks", lambda device: False)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        done = []
        together = list(run.answers(TEXTS * 3, HOW[how], read_ahead=100, tick=done.append))
        assert torch.get_num_threads() == 3
        used = set(log.read_text().splitlines())
        with pytest.raises(UserError, match="logits are NaN"):
            _broken(run).predict(TEXTS * 3, HOW[how])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert len(used) > 1
    assert f"{os.getpid()} {threading.get_ident()}" not in used
    assert (by == "forks") == (len({line.split()[0] for line in used}) > 1)
    assert sum(done) == len(TEXTS) * 3
    assert not multiprocessing.active_children()
    for one, two in zip(alone, together, strict=True):
        close(one, two)


def _broken(run: Run) -> Run:
    model = copy.deepcopy(run.model)
    with torch.no_grad():
        next(model.stack.parameters()).fill_(torch.nan)
    return Run(model, run.source, run.target)


def test_answers_come_while_texts_are_still_read(translator):
    read = []

    def texts():
        for text in TEXTS:
            read.append(text)
            yield text

    done = []
    answers = translator.answers(texts(), DecodeConfig(max_new_tokens=4), read_ahead=3, tick=done.append)
    next(answers)
    assert len(read) == 3
    assert sum(done) == 3
    assert 1 + len(list(answers)) == len(TEXTS) == sum(done)


def test_nothing_to_predict(translator):
    assert translator.predict([]) == []
    with pytest.raises(UserError, match="for a single one, say"):
        translator.predict("cat")


def test_an_empty_line_is_a_source_that_only_ends(translator, writer):
    """An empty text can be translated, and continued."""
    run = translator
    memory = run.model.encode(torch.tensor([[run.source.end]]))
    plain = greedy(run.model, Request.after(run.target.start, run.target.end, memory, 9))[0]
    assert run.predict([""], DecodeConfig(max_new_tokens=9))[0][0].tokens == run.target.tokens(plain.tokens)
    prefix = torch.tensor([[writer.target.end]])
    plain = greedy(writer.model, Request(prefix, writer.target.end, torch.tensor([9])))[0]
    assert writer.predict([""], DecodeConfig(max_new_tokens=9))[0][0].tokens == writer.target.tokens(plain.tokens)


def test_room_for_an_answer_depends_on_the_source(translator):
    coded = [EncodedInput([5] * 4), EncodedInput([5])]
    assert translator.request(coded, DecodeConfig()).max_new_tokens.tolist() == [28, 22]
    assert translator.request(coded, DecodeConfig(max_new_tokens=7)).max_new_tokens.tolist() == [7, 7]


@pytest.fixture(scope="module")
def short(words) -> Run:
    """Return an encoder-decoder with 8 positions on either side."""
    overrides = ('model.embed.position={part="learned", length=8}',)
    return Run(make("transformer", words, overrides), words, words)


@pytest.fixture(scope="module")
def short_writer(words) -> Run:
    return Run(make("transformer-decoder", words, ("model.embed.position.length=8",), "nano"), words, words)


LONG = "the cat sat on the mat and the dog sat on a cat"  # 13 tokens


@pytest.mark.parametrize("which", ["short", "short_writer"])
def test_a_text_beyond_the_positions_is_refused_by_its_line(which, request):
    run = request.getfixturevalue(which)
    with pytest.raises(UserError, match=r"^line 3 has 13 tokens, and at most 7 can be taken: shorten it"):
        run.predict(["cat", "dog", LONG, LONG])
    with pytest.raises(UserError, match=r"^line 3 has 13 tokens"):
        list(run.answers(["cat", "dog", LONG], read_ahead=2))


def test_a_text_beyond_the_positions_is_cut_when_asked(short, short_writer):
    config = DecodeConfig(truncate=True, max_new_tokens=3)
    cut, whole = short.predict([LONG, "cat"], config)
    assert (cut[0].cut, whole[0].cut) == (True, False)
    assert cut[0].text == short.predict([" ".join(LONG.split()[:7])], config)[0][0].text
    cut = short_writer.predict([LONG], config)[0][0]
    assert cut.cut
    assert cut.tokens == short_writer.predict([" ".join(LONG.split()[-4:])], config)[0][0].tokens


@pytest.mark.parametrize("config", [DecodeConfig(), DecodeConfig(beam=3), DecodeConfig(temperature=1.0, seed=1)])
def test_answers_keep_within_the_positions(short, short_writer, config):
    for text in ("cat", " ".join(LONG.split()[:7])):
        assert len(short.predict([text], config)[0][0].tokens) <= 8
        long = 1 + len(text.split())
        answer = short_writer.predict([text], config)[0][0]
        assert len(answer.tokens) == 8 - long + 1 or answer.ended
    mixed = short_writer.predict(["cat", " ".join(LONG.split()[:7]), "cat dog"], config)
    assert all(answers[0].tokens for answers in mixed)


def test_very_long_texts_are_refused_where_positions_are_endless(translator):
    with pytest.raises(UserError, match=r"line 2 has 10,001 tokens, and at most 10,000"):
        translator.predict(["cat", "cat " * 10_001])
    with pytest.raises(UserError, match=r"line 1 has 2 tokens, and at most 1 "):
        translator.predict(["cat dog"], DecodeConfig(max_source_tokens=1))


@pytest.mark.parametrize("name", PAIRS)
def test_alignments_are_where_the_model_looked_while_it_decoded(name, words):
    """Step by step with the cache, one text at a time, against all answers at once."""
    run = Run(make(name, words), words, words)
    together = run.predict(TEXTS, DecodeConfig(max_new_tokens=7), attention=True)
    for text, [answer] in zip(TEXTS, together, strict=True):
        weights = torch.tensor(answer.alignment.weights, dtype=torch.float64)
        assert weights.shape == (len(answer.tokens) + answer.ended, len(text.split()) + 1)
        assert weights.sum(1).tolist() == pytest.approx([1.0] * len(weights))
        assert answer.alignment.source == [*text.split(), "</s>"]
        assert answer.alignment.target == answer.tokens + ["</s>"] * answer.ended
        request = run.request(run.encode_inputs([text], DecodeConfig()), DecodeConfig(max_new_tokens=7))
        with watch(run.model, "stack*weights") as seen:
            greedy(run.model, request)
        owner = {tap: run.model.get_submodule(tap.removesuffix(".attend.weights")) for tap in seen}
        crossing = [steps for tap, steps in seen.items() if getattr(owner[tap], "over", "memory") == "memory"]
        assert crossing
        looked = torch.stack([torch.cat([step.mean(1) for step in steps], 1)[0] for steps in crossing]).mean(0)
        torch.testing.assert_close(weights, looked)


def test_alignments_when_answer_and_source_are_equally_long(translator):
    """So that weights over the source and over the answer have the same shape."""
    text = "dog and cat"
    config = DecodeConfig(max_new_tokens=4)
    answer = translator.predict([text], config, attention=True)[0][0]
    assert len(answer.tokens) + answer.ended == len(text.split()) + 1
    answers = translator.predict([text, LONG], config, attention=True)
    assert answers[0][0].alignment.weights == [pytest.approx(row) for row in answer.alignment.weights]


def test_every_answer_has_its_own_alignment(translator):
    answers = translator.predict(TEXTS, DecodeConfig(beam=4, num_return=3, max_new_tokens=8), attention=True)
    for text, three in zip(TEXTS, answers, strict=True):
        assert len(three) == 3
        for answer in three:
            assert len(answer.alignment.weights) == len(answer.tokens) + answer.ended
            assert len(answer.alignment.weights[0]) == len(text.split()) + 1


def test_no_alignment_where_there_is_no_source(writer, words):
    with pytest.raises(UserError, match="no source"):
        writer.predict(["cat"], attention=True)
    layer = 'model.decoder.layer=[{mixer={part="attention"}, feedforward="mlp"}]'
    blind = Run(make("transformer", words, (layer,)), words, words)
    with pytest.raises(UserError, match="no attention over single source positions"):
        blind.predict(["cat"], attention=True)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "characters", "words", "wordpiece", "pretokenised"])
@pytest.mark.parametrize("name", ["transformer", "transformer-decoder"])
def test_a_stream_is_the_answer_in_pieces(name, kind):
    """Untrained models generate arbitrary bytes, most of which form no characters."""
    texts = ["a cat, 你好 sat!", "süß", "", "🙂 é"]
    tokenizer = Tokenizer.train(kind, [*TEXTS, *texts])
    run = Run(make(name, tokenizer, ("model.depth=1",)), tokenizer, tokenizer)
    pieces = 0
    for config in (
        DecodeConfig(max_new_tokens=16),
        DecodeConfig(max_new_tokens=24, temperature=2.0, seed=4),
        DecodeConfig(max_new_tokens=5, beam=2),
    ):
        for text in texts:
            heard = list(run.stream(text, config))
            assert "".join(heard) == run.predict([text], config)[0][0].text
            assert all(heard)
            pieces += len(heard)
    assert pieces > 20


def test_no_piece_is_half_a_character(monkeypatch):
    tokenizer = Tokenizer.train("bytes", ["a"])
    run = Run(make("transformer-decoder", tokenizer), tokenizer, tokenizer)
    said = "你好, 🙂e\u0301"
    ids = [*tokenizer.encode([said])[0], *tokenizer.encode(["é"])[0][:1]]  # and half of one at the end

    def spoken(*_):
        for i in [*ids, tokenizer.end]:
            yield NewTokens(torch.tensor([0]), torch.tensor([i]), torch.tensor([0.0]))

    monkeypatch.setattr("regard.tasks.run.stream", spoken)
    assert list(run.stream("x")) == ["你", "好", ",", " ", "🙂", "e", "\u0301", "\ufffd"]


def test_what_follows_a_prompt_fits_behind_it(writer, monkeypatch):
    """Words have a space between them, also where the prompt ends."""
    ids = writer.target.encode(["and dog"])[0]
    answer = writer._text(EncodedInput(writer.target.encode(["cat"])[0]), ids)
    assert answer == " and dog"
    assert writer._text(EncodedInput([]), ids) == "and dog"


@pytest.mark.parametrize(("documents", "wanted"), [(True, "</s>"), (False, "\n")])
def test_a_prompt_begins_as_texts_did_in_training(documents, wanted):
    tokenizer = Tokenizer.train("characters", ["ab\n"])
    run = Run(make("transformer-decoder", tokenizer), tokenizer, tokenizer, documents=documents)
    assert tokenizer.tokens(run.decoder_prefix) == [wanted]
    request = run.request(run.encode_inputs(["ab"], DecodeConfig()), DecodeConfig())
    assert tokenizer.tokens(request.prefix[0]) == [wanted, "a", "b"]
    assert request.max_new_tokens.tolist() == [200]


def test_a_running_text_without_line_ends_is_marked(words):
    assert Run(make("transformer-decoder", words), words, words, documents=False).decoder_prefix == [words.end]


def test_a_seed_and_a_text_decide_the_answer(writer):
    def said(texts, seed):
        return [a[0].text for a in writer.predict(texts, DecodeConfig(temperature=3.0, seed=seed, max_new_tokens=12))]

    assert said(["cat", "dog", "cat"], 1) == said(["cat", "dog", "cat"], 1)
    assert said(["cat", "dog", "cat"], 1)[0] == said(["cat"], 1)[0] == said(["cat", "dog", "cat"], 1)[2]
    assert said(["cat", "dog"], 1) != said(["cat", "dog"], 2)
    assert len({tuple(said(["cat"], None)) for _ in range(4)}) > 1


def test_the_recipe_says_how_to_decode(words):
    model = make("transformer", words)
    assert Run(model, words, words).config == DecodeConfig(beam=4)
    model.recipe["decode"] = {"beam": 5, "length_penalty": 0.6}
    assert Run(model, words, words).config == DecodeConfig(beam=5, length_penalty=0.6)
    model.recipe["decode"] = {"temperature": 0.7}
    assert Run(model, words, words).config == DecodeConfig(temperature=0.7)
    model.recipe["decode"] = {"beem": 5}
    with pytest.raises(UserError, match=r"did you mean 'decode.beam'"):
        Run(model, words, words).predict(["cat"])


def test_a_language_model_draws_unless_told_otherwise(words):
    """Greedy texts repeat themselves. With a seed, so that answers are the same again; what is said about
    how tokens are chosen counts alone, and a model from elsewhere is asked as its own files say."""
    model = make("transformer-decoder", words)
    run = Run(model, words, words)
    assert run.config == DEFAULT_SAMPLING == DecodeConfig(temperature=0.8, top_p=0.95, seed=1)
    assert run.predict(["the cat"]) == run.predict(["the cat"])
    assert "".join(run.stream("the cat")) == run.predict(["the cat"])[0][0].text
    assert DecodeConfig.read({"seed": 5, "max_new_tokens": 7}, run.config) == DecodeConfig(
        temperature=0.8, top_p=0.95, seed=5, max_new_tokens=7
    )
    assert DecodeConfig.read({"temperature": 1.0}, run.config) == DecodeConfig(temperature=1.0)
    assert (
        DecodeConfig.read({"temperature": 0.0}, run.config)
        == DecodeConfig.read({"beam": 1}, run.config)
        == DecodeConfig()
    )
    assert DecodeConfig.read({"repetition_penalty": 1.2}, run.config) == DecodeConfig(repetition_penalty=1.2)
    assert DecodeConfig.read({"beam": 3, "max_new_tokens": 7}, run.config) == DecodeConfig(beam=3, max_new_tokens=7)
    model.recipe["decode"] = {"max_new_tokens": 9}
    longer = Run(model, words, words).config
    assert longer == DecodeConfig(temperature=0.8, top_p=0.95, seed=1, max_new_tokens=9)
    assert DecodeConfig.read({"temperature": 0.5}, longer) == DecodeConfig(temperature=0.5, max_new_tokens=9)
    model.recipe["decode"] = {"temperature": 0.0}
    assert Run(model, words, words).config == DecodeConfig()
    del model.recipe["decode"]
    assert Run(model, words, words, converted=True).config == DecodeConfig()


def test_a_model_that_does_not_write_is_refused(words):
    run = Run(make("transformer-encoder", words, ("model.head.classes=3",)), words, words)
    with pytest.raises(UserError, match="does not step"):
        run.predict(["cat"])


# Loading


def write(folder, model: Model, tokenizer: Tokenizer, **told) -> None:
    """Write a finished run folder, with the files that loading reads."""
    regard.save(model, folder)
    tokenizer.save(folder / "tokenizer.json")
    (folder / "run.json").write_text(json.dumps(told))


@pytest.fixture
def folder(tmp_path, words):
    model = make("transformer", words).float()
    hashes = [words.hash(), words.hash()]
    write(tmp_path / "run", model, words, documents=False, tokenizers=hashes)
    return tmp_path / "run"


def test_load(folder, words):
    run = regard.load(folder)
    assert isinstance(run, Run)
    assert run.note == ""
    assert run.documents is False
    assert not run.model.training
    direct = Run(make("transformer", words).float(), words, words)
    assert [a[0].tokens for a in run.predict(TEXTS)] == [a[0].tokens for a in direct.predict(TEXTS)]


def test_separate_tokenizers(tmp_path, words):
    letters = Tokenizer.train("characters", TEXTS)
    model = regard.build("transformer", size="tiny", vocab=(letters.size, words.size), overrides=["model.tie=none"])
    write(tmp_path, model, words)
    words.save(tmp_path / "target.tokenizer.json")
    letters.save(tmp_path / "source.tokenizer.json")
    (tmp_path / "tokenizer.json").unlink()
    run = load(tmp_path)
    assert (run.source.size, run.target.size) == (letters.size, words.size)
    answer = run.predict(["cat"], DecodeConfig(max_new_tokens=5), attention=True)[0][0]
    assert answer.alignment.source == ["c", "a", "t", "</s>"]


def keep(folder, model: Model, step: int):
    return checkpoint.write(folder / "checkpoints", step, model, {"own/0": torch.zeros(2)}, {"step": step})


def test_a_run_that_was_stopped_gives_its_newest_checkpoint(folder, words):
    older, newer = make("transformer", words).float(), make("transformer", words).float()
    with torch.no_grad():
        newer.head.table += 1
    (folder / "model.safetensors").unlink()
    keep(folder, older, 90)
    kept = keep(folder, newer, 1200)
    run = load(folder)
    assert run.note == "this run is not finished: this is the model of step 1,200"
    assert torch.equal(run.model.head.table, newer.head.table)
    with open(kept / "model.safetensors", "r+b") as file:
        file.seek(5000)
        file.write(b"damage")
    run = load(folder)
    assert run.note.startswith("this run is not finished: this is the model of step 90; ")
    assert "damaged" in run.note
    assert torch.equal(run.model.head.table, older.head.table)


def test_a_run_without_any_model(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="holds no model yet, neither a finished one nor a whole checkpoint"):
        load(folder)


def test_a_tokenizer_of_another_run(folder, words):
    other = Tokenizer.train("words", [*TEXTS, "one more"])
    other.save(folder / "tokenizer.json")
    with pytest.raises(UserError, match=rf"source tokenizer has {other.size} tokens and the model {words.size}"):
        load(folder)
    same_size = Tokenizer.train("words", [text.replace("cat", "cow") for text in TEXTS])
    assert same_size.size == words.size
    same_size.save(folder / "tokenizer.json")
    with pytest.raises(UserError, match="source tokenizer is not the one that this model was trained with"):
        load(folder)


def test_folders_that_are_no_runs(folder, tmp_path):
    with pytest.raises(UserError, match=r"there is no run folder '.*nowhere'"):
        load(tmp_path / "nowhere")
    (folder / "run.json").write_text("{half")
    with pytest.raises(UserError, match=r"run\.json cannot be read"):
        load(folder)
    (folder / "run.json").write_text("[]")
    with pytest.raises(UserError, match=r"run\.json is no table"):
        load(folder)
    (folder / "run.json").unlink()
    with pytest.raises(UserError, match=r"is not a run folder: it holds no run\.json"):
        load(folder)


def test_a_device_that_is_not_there(folder):
    with pytest.raises(UserError, match="there is no device 'nonsense' here"):
        load(folder, "nonsense")


def test_damaged_weights(folder):
    (folder / "model.safetensors").write_bytes(b"damage")
    with pytest.raises(UserError, match="is damaged or cut off"):
        load(folder)


def test_importing_regard_is_light():
    """What only runs need is imported when a run is loaded; the recipe loader is at home in core."""
    code = (
        "import sys, regard\n"
        "heavy = {'tokenizers', 'pyarrow', 'sacrebleu', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert regard.core.load('transformer')['title'] == 'Transformer'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_beams_of_a_batch_keep_their_sources(translator):
    """`select` also selects the rows of the encoder's memory."""
    memory = translator.model.encode(torch.tensor([[5, 6], [7, 8]]))
    assert torch.equal(select(memory, torch.tensor([1, 1])).x, memory.x[[1, 1]])
