"""A model is a plain nn.Module: what people do to modules of PyTorch works on one recipe of every family."""

import copy
import pickle
import warnings

import pytest
import torch
from captum.attr import LayerActivation, LayerIntegratedGradients
from torch import nn
from torch.ao.nn.quantized import dynamic as nnqd
from torch.nn.utils import prune

import regard
from regard.core import Mixer, Norm
from regard.decode import Request, greedy
from regard.decode.session import Session
from tests.models import shallow

DECODERS = ["gpt2", "llama", "mistral", "retnet", "rwkv4", "deltanet", "performer", "s4", "transformer-xl"]
OTHERS = ["bert", "fasttext", "vit", "longformer", "transformer", "t5", "whisper", "seq2seq-luong"]


def drawn(name):
    torch.manual_seed(0)
    model = regard.build(name, size="tiny", vocab=61).eval()
    given = model.random_inputs(2, 9)
    return model, given.pop("tokens"), given


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", [*DECODERS, *OTHERS])
def test_quantize_dynamic(name):
    """Every linear map is replaced, and the model gives about the same; in steps the same as whole."""
    model, tokens, given = drawn(name)
    count = sum(type(module) is nn.Linear for module in model.modules())
    small = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    replaced = [module for module in small.modules() if type(module) is nnqd.Linear]
    assert len(replaced) == count > 0
    with torch.no_grad():
        wanted, found = model(tokens, **given), small(tokens, **given)
    assert 0 < (found - wanted).abs().max() < 0.2 * wanted.abs().max()
    if name in DECODERS[:4]:
        session = Session(small)
        with torch.no_grad():
            state, outputs = session.start(2, 9), []
            for at in range(9):
                y, state = session.step(tokens[:, at : at + 1], state)
                outputs.append(y)
        assert (torch.cat(outputs, 1) - found).abs().max() < 0.2 * wanted.abs().max()  # inputs are rounded by the batch


@pytest.mark.filterwarnings("ignore::UserWarning")  # of token numbers, which have no gradient
@pytest.mark.parametrize("name", [*DECODERS, *OTHERS])
def test_hooks_fire_forwards_and_backwards(name):
    """Of every module whose forward does something: linear maps, norms, mixers, layers, stacks, embeds and heads."""
    model, tokens, given = drawn(name)
    kinds = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.LSTM, Norm, Mixer, type(model.stack), type(model.embed))
    watched = {
        path: m for path, m in model.named_modules() if isinstance(m, kinds) and not getattr(m, "is_identity", False)
    }
    forth, back = set(), set()
    for path, module in watched.items():
        module.register_forward_hook(lambda *_, path=path: forth.add(path))
        module.register_full_backward_hook(lambda *_, path=path: back.add(path))
    y = model(tokens, **given)
    y.square().mean().backward()
    used = {path for path, m in watched.items() if any(p.grad is not None for p in m.parameters())}
    used = {path for path in used if not path.endswith(".hub")}  # longformer calls the parts of it
    assert used <= forth
    assert {path for path in used if any(True for _ in watched[path].parameters(recurse=False))} <= back
    if name in DECODERS:
        forth.clear()
        session = Session(model)
        with torch.no_grad():
            session.step(tokens[:, 3:4], session.step(tokens[:, :3], session.start(2, 9))[1])
        assert used <= forth


@pytest.mark.parametrize("name", ["gpt2", "transformer", "retnet", "bert"])
def test_copied_and_pickled(name):
    model, tokens, given = drawn(name)
    wanted = model(tokens, **given)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(tokens, **given), wanted)


@pytest.mark.filterwarnings("ignore::UserWarning")  # dynamo tells of functions with a cache
@pytest.mark.parametrize("name", ["gpt2", "transformer", "retnet", "bert"])
def test_compiled(name):
    """GPT-2 in two layers; the others in one, as what is traced is the same in every layer."""
    one_layer = (
        [f"model.{side}.depth=1" for side in ("encoder", "decoder")] if name == "transformer" else ["model.depth=1"]
    )
    model = shallow(name, overrides=[] if name == "gpt2" else one_layer).eval()
    given = model.random_inputs(2, 9)
    wanted = model(**given)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(**given), wanted)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "retnet"])
def test_exported(name):
    model, tokens, given = drawn(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(model, (tokens,), given, strict=False)
    torch.testing.assert_close(program.module()(tokens, **given), model(tokens, **given))


@pytest.mark.parametrize("name", ["gpt2", "transformer", "retnet"])
def test_pruned(name):
    """The pruned model decodes with the pruned weights."""
    model, tokens, given = drawn(name)
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            prune.l1_unstructured(module, "weight", 0.9)
    memory = model.encode(given["source"]) if given else None
    with torch.no_grad():
        request = Request(tokens[:, :3], 60, torch.tensor([4, 4]), memory=memory)
        said = greedy(model, request)
        row = [*tokens[0, :3].tolist(), *said[0].tokens]
        logits = model(torch.tensor([row]), memory=None if memory is None else memory._replace(x=memory.x[:1]))
    assert logits[0, 2:-1].argmax(-1).tolist() == said[0].tokens[: len(row) - 3]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_captum(name):
    """Activations of a layer are what a hook sees; attributions to the embeddings add up to the difference."""
    model, tokens, _ = drawn(name)
    layer, seen = model.stack.layers[1], []
    layer.register_forward_hook(lambda module, given, y: seen.append(y.detach()))
    found = LayerActivation(model, layer).attribute(tokens)
    torch.testing.assert_close(found, seen[-1])

    def score(tokens):
        y = model(tokens)
        return y.reshape(len(y), -1)[:, 7]

    zeros = torch.zeros_like(tokens)
    given = LayerIntegratedGradients(score, model.embed).attribute(tokens, zeros, n_steps=200)
    wanted = score(tokens) - score(zeros)
    torch.testing.assert_close(given.sum((1, 2)), wanted, rtol=0.02, atol=0.02)
