"""Transformer-XL in the authors' layout and in Hugging Face's: `transformers` has dropped the model, so what is special
(the adaptive softmax, ties, names) is compared with its equations, token by token."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from regard.convert.convert import convert
from regard.convert.family import family_of
from regard.core import Context, UserError, build
from regard.data.batches import IGNORE
from regard.parts.objectives.next_token import token_loss

BASE = {
    "model_type": "transfo-xl", "n_token": 41, "n_layer": 2, "n_head": 3, "d_model": 24, "d_head": 6, "d_inner": 20,
    "dropout": 0.0, "dropatt": 0.0, "tie_weight": True, "d_embed": 24, "div_val": 1, "tie_projs": [False],
    "pre_lnorm": False, "tgt_len": 5, "ext_len": 0, "mem_len": 4, "cutoffs": [], "attn_type": 0, "clamp_len": -1,
    "same_length": False,
}  # fmt: skip
CONFIGS = {
    "plain": {},
    "untied": {"tie_weight": False, "d_head": 8, "pre_lnorm": True, "clamp_len": 3},
    "narrow": {"d_embed": 10, "tie_projs": [True], "same_length": True},
    "narrow untied": {"d_embed": 10, "tie_weight": False},
    "one table": {"cutoffs": [9, 20]},
    "one narrow table": {"cutoffs": [9, 20], "d_embed": 14, "tie_projs": [False, True, False]},
    "divided": {"cutoffs": [9, 20], "div_val": 2, "tie_projs": [False, True, True]},
    "divided, narrow, untied": {"cutoffs": [9], "div_val": 3, "d_embed": 18, "tie_weight": False},
    "layers' own u and v": {"untie_r": True},
}
HUGGING = {
    "model_type": "transfo-xl", "architectures": ["TransfoXLLMHeadModel"], "vocab_size": 41, "n_layer": 2, "n_head": 3,
    "d_model": 24, "d_embed": 24, "d_head": 6, "d_inner": 20, "cutoffs": [9, 20], "div_val": 2, "mem_len": 4,
    "same_length": True, "clamp_len": 3, "untie_r": True, "proj_share_all_but_first": True,
}  # fmt: skip


def weights(config):
    """Ours, theirs made of it by the rules, and the config with all its entries."""
    torch.manual_seed(0)
    family = family_of(config)
    whole = family.complete(config)
    made = family.recipe(whole)
    assert family.recipe(family.complete(json.loads(json.dumps(family.config(made))))) == made
    model = build(made).eval()
    own = model.state_dict(keep_vars=True)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    rules = list(family.rules(whole, ()))
    theirs = {rule.theirs: rule.join([own[name].detach() for name in rule.ours]) for rule in rules}
    filled = {id(own[name]) for rule in rules for name in rule.ours}
    assert filled == {id(p) for p in model.parameters()}
    for rule in rules:
        for name, value in zip(rule.ours, rule.split(theirs[rule.theirs]), strict=True):
            assert torch.equal(own[name], value), rule.theirs
    theirs |= {second: theirs[first] for second, first in family.aliases(whole).items()}
    return model, theirs, whole


def embedded(w, c, at, token):
    if c["div_val"] == 1:
        x = w[f"{at}word_emb.emb_layers.0.weight"][token]
        return x if c["d_embed"] == c["d_model"] else w[f"{at}word_emb.emb_projs.0"] @ x
    ends = [0, *c["cutoffs"], c["n_token"]]
    g = next(g for g in range(len(ends) - 1) if ends[g] <= token < ends[g + 1])
    return w[f"{at}word_emb.emb_projs.{g}"] @ w[f"{at}word_emb.emb_layers.{g}.weight"][token - ends[g]]


def log_p(w, c, x, from_the_last):
    """(vocab,) from a vector (width,)"""
    ends = [0, *c["cutoffs"], c["n_token"]]
    groups, made = len(ends) - 1, []
    for g in range(groups):
        if c["div_val"] == 1:
            table, bias = (w[f"crit.out_layers.0.{kind}"][ends[g] : ends[g + 1]] for kind in ("weight", "bias"))
        else:
            table, bias = (w[f"crit.out_layers.{g}.{kind}"] for kind in ("weight", "bias"))
        mapped = c["div_val"] > 1 or c["d_embed"] != c["d_model"]
        y = w[f"crit.out_projs.{g}"].T @ x if mapped else x
        scores = table @ y + bias
        if g == 0 and groups > 1:
            scores = torch.cat((scores, w["crit.cluster_weight"] @ y + w["crit.cluster_bias"]))
        made.append(F.log_softmax(scores, -1))
    row = (lambda g: -g) if from_the_last else (lambda g: ends[1] + g - 1)
    return torch.cat([made[0][: ends[1]], *(made[0][row(g)] + made[g] for g in range(1, groups))])


@pytest.mark.parametrize("name", CONFIGS)
def test_words(name):
    model, w, c = weights(BASE | CONFIGS[name])
    tokens = torch.arange(41)[None]
    context = Context.begin(1, 41)
    want = torch.stack([embedded(w, c, "", int(token)) for token in tokens[0]]) * 24**0.5
    assert torch.allclose(model.embed(tokens, context)[0], want, atol=1e-5)
    x = torch.randn(1, 5, 24)
    found = model.head(x, Context.begin(1, 5)).log_softmax(-1)[0]
    assert torch.allclose(found, torch.stack([log_p(w, c, one, True) for one in x[0]]), atol=1e-5)
    assert torch.allclose(found.exp().sum(-1), torch.ones(5), atol=1e-5)
    names = {"r_w_bias", "layers.1.dec_attn.r_net.weight", "layers.0.pos_ff.CoreNet.3.bias", "crit.out_layers.0.bias"}
    assert names - ({"r_w_bias"} if c["untie_r"] else set()) <= set(w)
    assert ("layers.1.dec_attn.r_w_bias" in w and "r_w_bias" not in w) == c["untie_r"]


def test_hugging_face():
    """Other names, and the clusters' rows in the other order."""
    model, w, c = weights(HUGGING)
    assert torch.equal(w["crit.out_projs.2"], w["transformer.word_emb.emb_projs.2"])
    assert not torch.equal(w["crit.out_projs.0"], w["transformer.word_emb.emb_projs.0"])
    x = torch.randn(1, 5, 24)
    found = model.head(x, Context.begin(1, 5))[0]
    assert torch.allclose(found, torch.stack([log_p(w, c, one, False) for one in x[0]]), atol=1e-5)
    assert "transformer.layers.0.dec_attn.r_w_bias" in w
    assert model.stack.layers[0].branches["mixer"].position.clip == 3


def test_unknown_words():
    model, _, _ = weights(BASE | CONFIGS["divided"])
    for tokens in ([[3, 41]], [[-1, 3]]):
        with pytest.raises(UserError, match="the vocabulary is from 0 to 40"):
            model(torch.tensor(tokens))
    with pytest.raises(UserError, match="whole numbers"):
        model(torch.rand(1, 3))


def test_u_and_v():
    one = weights(BASE)[0].stack.layers
    own = weights(BASE | {"untie_r": True})[0].stack.layers
    assert one[0].branches["mixer"].position.u is one[1].branches["mixer"].position.u
    assert own[0].branches["mixer"].position.u is not own[1].branches["mixer"].position.u


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"attn_type": 2}, "attn_type = 2"),
        ({"ext_len": 3}, "ext_len = 3"),
        ({"cutoffs": [30, 20]}, "must rise"),
    ],
)
def test_refused(entry, message):
    with pytest.raises(UserError, match=message):
        weights(BASE | entry)


@pytest.mark.parametrize("config", [BASE | CONFIGS["divided"], BASE, HUGGING], ids=["authors", "plain", "hugging face"])
def test_folders(config, tmp_path):
    """In and out again: every tensor, the doubled ones and the sinusoids' speeds, too."""
    _, w, _ = weights(config)
    source, run, back = tmp_path / "source", tmp_path / "run", tmp_path / "back"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    at = "transformer." if "vocab_size" in config else ""
    speeds = {f"{at}pos_emb.inv_freq": torch.rand(12)}
    w |= speeds
    save_file({name: tensor.clone() for name, tensor in w.items()}, source / "model.safetensors")
    convert(source, run)
    convert(run, back)
    after = load_file(back / "model.safetensors")
    assert after.keys() == w.keys()
    assert all(torch.equal(after[name], w[name]) for name in w)
    told = json.loads((back / "config.json").read_text())
    assert {k: v for k, v in told.items() if k in config} == config


@pytest.mark.parametrize("name", ["one table", "one narrow table", "divided", "divided, narrow, untied"])
def test_loss_without_all_scores(name):
    """The groups that a batch needs, and no others: the same loss and gradients."""
    model, _, _ = weights(BASE | CONFIGS[name])
    targets = torch.tensor([[0, 8, 9, 19, IGNORE, 40, 20], [39, 10, 3, IGNORE, 5, 30, 12]])
    for right in (targets, targets.clamp(max=8)):
        found = []
        for smoothing in (0.0, 1e-9):  # the second needs the scores of all
            torch.manual_seed(1)
            x = torch.randn(2, 7, 24, requires_grad=True)
            model.zero_grad()
            loss, _ = token_loss(model, x, Context.begin(2, 7), right, smoothing)
            loss.backward()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.head.parameters()]
            found.append([loss, x.grad, *grads])
        for one, two in zip(*found, strict=True):
            assert torch.allclose(one, two, atol=1e-4)
