"""BERT, RoBERTa, ALBERT, DistilBERT and RoFormer, beside `transformers` with random weights: outputs,
gradients, padded batches, segments, and the way back."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from regard.convert import convert, every_family, family_of
from regard.core import Context, UserError, build, restore
from regard.data import Tokenizer
from regard.files import recipe

from .encoders import CASES, SMALL, VALID, VOCAB, saved, theirs
from .live import agree, config_of, near, twins


def draw(pair):
    torch.manual_seed(3)
    tokens = torch.randint(3, VOCAB, VALID.shape)
    types = pair.config.get("type_vocab_size", 0)
    segments = torch.randint(types, VALID.shape) if types else None
    return tokens, segments


def asked(pair, tokens, segments):
    """Everything that theirs answers, and the same of ours: at real positions alone where there are positions."""
    more = {} if segments is None else {"token_type_ids": segments}
    want = pair.theirs(input_ids=tokens, attention_mask=VALID.long(), **more)
    model = pair.ours
    context = Context.begin(*tokens.shape, valid=VALID, segments=segments)
    x = model.hidden(tokens, context)
    found = {"first": model.head(x, context)}
    known = {"first": next(v for k, v in want.items() if k in ("logits", "prediction_logits", "last_hidden_state"))}
    for name, method in (("seq_relationship_logits", "pair"), ("sop_logits", "pair"), ("pooler_output", "vector")):
        if want.get(name) is not None:
            known[name], found[name] = want[name], getattr(model.head, method)(x, context)
    real = {name: (value[VALID] if value.dim() == 3 else value) for name, value in found.items()}
    return list(real.values()), [value[VALID] if value.dim() == 3 else value for value in known.values()]


@pytest.mark.parametrize("name", CASES)
def test_beside_transformers(name):
    pair = twins(theirs(*CASES[name]))
    ours, want = asked(pair, *draw(pair))
    assert len(want) == 1 + ("pretraining" in name) + ("bare" in name and bool(pair.family.pooler))
    agree(pair, ours, want)


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name, tmp_path):
    """Byte for byte, and theirs loads it with nothing missing and nothing too many."""
    model = twins(theirs(*CASES[name])).theirs  # its weights are random now
    model.save_pretrained(tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "back")
    before, after = (load_file(tmp_path / where / "model.safetensors") for where in ("there", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(before[key].dtype == after[key].dtype for key in before)
    again, report = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    told, said = (json.loads((tmp_path / where / "config.json").read_text()) for where in ("there", "back"))
    assert {key: said[key] for key in told} == told
    assert config_of(again)["architectures"] == told["architectures"]


def test_places_are_counted_from_behind_the_padding():
    pair = twins(theirs(*CASES["roberta bare"]))
    assert (pair.ours.embed.position.offset, pair.ours.limit) == (3, 16)
    with pytest.raises(UserError, match="longer than this model's 16 positions"):
        pair.ours(torch.full((1, 17), 5))


def test_places_of_a_run_trained_here():
    """Its tokenizer pads by 0, and from that number on theirs counts."""
    assert Tokenizer.train("characters", ["abc"]).pad == 0
    config = every_family()["roberta"].config(recipe.load("roberta") | {"vocab": 31})
    assert (config["pad_token_id"], config["max_position_embeddings"]) == (0, 513)


def test_a_layer_is_shared():
    pair = twins(theirs(*CASES["albert masked"]))
    assert len(pair.ours.stack.layers) == 3
    assert len({id(layer) for layer in pair.ours.stack.layers}) == 1
    pair = twins(theirs(*CASES["albert in groups"]))
    assert [id(layer) for layer in pair.ours.stack.layers[:2]] == [id(layer) for layer in pair.ours.stack.layers[2:]]
    assert len({id(layer) for layer in pair.ours.stack.layers}) == 2


def test_the_table_that_came_is_the_table_that_turns():
    """RoFormer's sines are weights of the checkpoint: other ones give another answer, as there."""
    pair = twins(theirs(*CASES["roformer masked"]))  # random, so no longer sines
    other = build(pair.ours.recipe).stack.position.table
    assert float((pair.ours.stack.position.table - other).abs().max()) > 0.1
    assert not any("position" in name for name, _ in pair.ours.named_parameters())


def test_the_first_checkpoints_of_bert(tmp_path):
    """They say MaskedLM, hold both heads, and call the numbers of a norm gamma and beta."""
    model = saved("BertForPreTraining", SMALL, tmp_path / "there", architectures=["BertForMaskedLM"])
    names = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}
    tensors = {}
    for key, value in load_file(tmp_path / "there" / "model.safetensors").items():
        for new, old in names.items():
            key = key.replace(new, old)
        tensors[key] = value
    save_file(tensors, tmp_path / "there" / "model.safetensors", {"format": "pt"})
    convert(tmp_path / "there", tmp_path / "run")
    ours = restore(tmp_path / "run").eval()
    tokens = torch.randint(3, VOCAB, (2, 7))
    context = Context.begin(2, 7)
    with torch.no_grad():
        x, want = ours.hidden(tokens, context), model(tokens)
        near(ours.head(x, context), want.prediction_logits)
        near(ours.head.pair(x, context), want.seq_relationship_logits)
    convert(tmp_path / "run", tmp_path / "back")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert tensors.keys() == after.keys()
    assert all(torch.equal(tensors[key], after[key]) for key in tensors)


@pytest.mark.parametrize("name", ["bert", "roberta", "albert"])
def test_a_bare_model_without_its_pooler(name, tmp_path):
    architecture, config = CASES[f"{name} bare"]
    saved(architecture, config, tmp_path / "there", ("pooler",))
    convert(tmp_path / "there", tmp_path / "run")
    assert restore(tmp_path / "run").recipe["model"]["head"] == {"part": "none"}
    convert(tmp_path / "run", tmp_path / "back")
    assert not any("pooler" in key for key in load_file(tmp_path / "back" / "model.safetensors"))


@pytest.mark.parametrize(("name", "head"), [("bert bare", "summary"), ("roberta masked", "vocabulary"),
                                            ("albert pretraining", "pretrain")])  # fmt: skip
def test_the_tensors_tell_the_head_where_nothing_is_said(name, head, tmp_path):
    saved(*CASES[name], tmp_path / "there", architectures="nothing")
    convert(tmp_path / "there", tmp_path / "run")
    assert restore(tmp_path / "run").recipe["model"]["head"]["part"] == head


@pytest.mark.parametrize("name", ["bert", "minilm", "roberta", "albert", "distilbert", "roformer"])
def test_our_own_recipes_go_out_and_come_back(name):
    family = next(f for f in every_family().values() if name in (f.recipe_name, *f.recipes))
    made = recipe.load(name, "tiny") | {"vocab": 31}
    config = family.complete(json.loads(json.dumps(family.config(made))))
    assert family.recipe(config)["model"] == made["model"]


def recipe_of(config):
    family = family_of(config)
    return family.recipe(family.complete(config))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bert masked", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
        ("bert masked", {"is_decoder": True}, "is_decoder = True"),
        ("bert masked", {"hidden_act": "mish"}, "hidden_act = 'mish', which regard does not know"),
        ("albert masked", {"num_hidden_groups": 2}, "num_hidden_groups = 2"),
        ("albert masked", {"inner_group_num": 0}, "inner_group_num: is 0, and should be at least 1"),
        ("roberta masked", {"max_position_embeddings": 2}, "the first place is number 2"),
        ("bert masked", {"architectures": ["BertForQuestionAnswering"]}, "'BertForQuestionAnswering'; of a bert"),
    ],
)
def test_what_is_not_read(name, change, message):
    config = config_of(theirs(*CASES[name])) | change
    with pytest.raises(UserError, match=message):
        recipe_of(config)


def test_one_label_is_a_number():
    made = twins(theirs(*CASES["bert rates"])).ours.recipe
    assert (made["model"]["head"]["part"], made["objective"]) == ("regress", {"part": "match"})


SHARED = Path(__file__).parents[3] / "shared" / "data"
REAL = [path for path in [SHARED / "weights-rxnmapper-albert"] if path.is_dir()]


def test_real_weights_of_albert(tmp_path):
    """Where the repository stands beside them. Their pooler, which a masked model lacks, goes back as it came."""
    for folder in REAL:
        convert(folder, tmp_path / "run")
        ours, model = restore(tmp_path / "run").eval(), transformers.AlbertForMaskedLM.from_pretrained(folder).eval()
        tokens = torch.randint(5, ours.vocab, VALID.shape)
        with torch.no_grad():
            want = model(input_ids=tokens, attention_mask=VALID.long()).logits
            near(ours(tokens, VALID)[VALID], want[VALID])
        convert(tmp_path / "run", tmp_path / "back")
        before, after = (load_file(where / "model.safetensors") for where in (folder, tmp_path / "back"))
        assert before.keys() == after.keys() >= {"albert.pooler.weight", "albert.pooler.bias"}
        assert all(torch.equal(before[key], after[key]) for key in after)
