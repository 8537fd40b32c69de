"""The laws, over every wiring found in parts/, in every variant that it names: whole models made with it."""

import inspect

import pytest
import torch
from torch import Tensor, nn

from regard.core import Context, Memory, Mixer, Model, Place, Stack, UserError, Wiring, build, part, watch
from regard.schema import find, names
from regard.verify import laws

VARIANTS = [(name, index) for name in names(Wiring) for index in range(len(find(Wiring, name).examples))]
SELF = {"part": "attention", "pattern": "causal"}
AHEAD = {"part": "attention", "pattern": "everything"}
CROSS = {"part": "attention", "over": "memory"}
MLP = {"part": "mlp", "hidden": 20}


def disturb(module: nn.Module) -> nn.Module:
    """Randomize all parameters, so that initial zeros and ones hide nothing."""
    torch.manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return module


def make(wiring: dict, kind: str) -> Model:
    torch.manual_seed(0)
    decoder = {"mixer": SELF, "feedforward": MLP, "wiring": wiring}
    encoder = {"mixer": AHEAD, "feedforward": MLP, "wiring": wiring}
    model = {"kind": kind, "width": 12, "heads": 3}
    if kind == "decoder":
        model |= {"depth": 2, "layer": [decoder], "norm": "layer"}
    else:
        model["encoder"] = {"depth": 2, "layer": [encoder], "norm": "layer"}
        model["decoder"] = {"depth": 2, "layer": [{"mixer": SELF, "cross": CROSS, **decoder}], "norm": "layer"}
    return disturb(build({"model": model, "vocab": 31}))


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize(("name", "index"), VARIANTS)
def test_laws(name, index, kind):
    model = make({"part": name, **find(Wiring, name).examples[index]}, kind)
    slow = ("long", "branches") if kind == "decoder" else ("long", "edited", "branches")  # which every recipe obeys
    findings = laws.check(model, without=slow)
    for subject, _ in laws.subjects(model):
        torch.manual_seed(0)
        findings.append(laws.long(subject, 150))  # more than two chunks, as there is no window
    for finding in findings:
        assert finding.holds, f"{finding.law}: {finding.worst:.2e} > {finding.limit:.0e} ({finding.detail})"


@pytest.mark.parametrize(("name", "index"), VARIANTS)
def test_every_weight_learns(name, index):
    model = make({"part": name, **find(Wiring, name).examples[index]}, "encoder-decoder").double()
    model(torch.randint(31, (2, 9)), source=torch.randint(31, (2, 7))).square().sum().backward()
    idle = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert idle == []


TAKES_NORM = [name for name in names(Wiring) if "norm" in inspect.signature(find(Wiring, name)).parameters]


@pytest.mark.parametrize("name", TAKES_NORM)
def test_padding_changes_nothing_in_training(name):
    """Every norm receives the mask of valid positions, which batch norm needs in training."""
    valid = torch.arange(9)[None] < torch.tensor([9, 4, 1])[:, None]
    found = []
    for garbage in (1.0, 1e3):
        made = stack({"part": name, "norm": "batch"}, 2, norm="batch")
        torch.manual_seed(1)
        x = torch.randn(3, 9, 12, dtype=torch.float64)
        x = torch.where(valid[..., None], x, garbage * torch.randn_like(x))
        y = made(x, Context.begin(3, 9, valid=valid))[valid]
        (y * torch.linspace(-1, 1, 12)).square().sum().backward()
        found.append([y.detach(), *(p.grad for p in made.parameters()), *made.buffers()])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-9)


def stack(wiring: dict, depth: int, kind: str = "decoder", **more) -> Stack:
    torch.manual_seed(depth)
    layer = {"mixer": SELF, "feedforward": MLP} if kind == "decoder" else {"mixer": SELF, "cross": CROSS, "ff": MLP}
    place = Place(memory=12, decoder=depth)
    settings = {"norm": "layer", "place": place, **more}
    made = Stack(width=12, heads=3, depth=depth, layer={**layer, "wiring": wiring}, **settings)
    return disturb(made).double()


# The published constants.


@pytest.mark.parametrize(
    ("place", "alpha", "beta"),
    [
        (Place("decoder", 0, 18), 36**0.25, 144**-0.25),
        (Place("encoder", 5, 0), 10**0.25, 40**-0.25),
        (Place("encoder", 18, 6), 0.81 * (18**4 * 6) ** (1 / 16), 0.87 * (18**4 * 6) ** (-1 / 16)),
        (Place("decoder", 18, 6), 18**0.25, 72**-0.25),
    ],
)
def test_deepnorm_weighs_by_depth(place, alpha, beta):
    mixer = part_mixer(MLP)
    born = [w.clone() for w in mixer.value_path()]
    wiring = part(Wiring, "deepnorm", width=12, branches=1, place=place)
    wiring.prepare(mixer)
    assert wiring.alpha == pytest.approx(alpha)
    for was, now in zip(born, mixer.value_path(), strict=True):
        torch.testing.assert_close(now, was * beta)


@pytest.mark.parametrize(
    ("place", "gain"),
    [
        (Place("decoder", 0, 18), 1.8930),  # sqrt(log 36)
        (Place("encoder", 5, 0), 1.5174),  # sqrt(log 10)
        (Place("encoder", 18, 6), 1.8581),  # sqrt(log 36 log 18 / 3)
        (Place("decoder", 18, 6), 1.7001),  # sqrt(log 18)
    ],
)
def test_subln_scales_by_depth(place, gain):
    wiring = part(Wiring, "subln", width=12, branches=1, place=place)
    for spec in (MLP, SELF):
        mixer = part_mixer(spec)
        born = [w.clone() for w in mixer.value_path()]
        wiring.prepare(mixer)
        for was, now in zip(born, mixer.value_path(), strict=True):
            torch.testing.assert_close(now, was * gain, rtol=1e-4, atol=0)


def part_mixer(spec: dict) -> Mixer:
    torch.manual_seed(1)
    return part(Mixer, spec, width=12, heads=3)


def test_subln_fills_the_slots_but_not_over_the_memory():
    layer = stack({"part": "subln", "norm": "rms"}, 2, "encoder-decoder").layers[0]
    found = {name: type(mixer.norm).__name__ for name, mixer in layer.branches.items()}
    assert found == {"mixer": "Rms", "cross": "None_", "ff": "Rms"}
    assert layer.branches["ff"].norm.inner.weight.shape == (20,)


def test_rezero_is_the_identity_at_birth():
    made = Stack(width=12, heads=3, depth=2, layer={"mixer": SELF, "feedforward": MLP, "wiring": "rezero"})
    x = torch.randn(2, 5, 12)
    assert torch.equal(made(x, Context.begin(2, 5)), x)


def test_parallel_branches_read_the_same():
    """The sum does not depend on the order of the branches."""
    made = stack({"part": "parallel"}, 1)
    layer, x = made.layers[0], torch.randn(2, 5, 12, dtype=torch.float64)
    context = Context.begin(2, 5)
    branches = layer.calls(context)
    torch.testing.assert_close(layer.wiring(x, branches, context), layer.wiring(x, branches[::-1], context))


# Reversible: nothing is kept, and the gradients are those of the plain chain.


def plain(made: Stack, x: Tensor, context: Context) -> Tensor:
    """The same layers through the ordinary graph."""
    wiring = made.layers[0].wiring
    return wiring.leave(Wiring.chain(list(made.layers), wiring.enter(x), context), made.norm, context)


def gradients(run, made: Stack, kind: str, padded: bool, seed: int = 11) -> dict[str, Tensor]:
    """The output and every gradient, that of the encoder's memory too; and the norms' running statistics."""
    torch.manual_seed(seed)
    made.zero_grad()
    x, source = (torch.randn(3, n, 12, dtype=torch.float64, requires_grad=True) for n in (9, 7))
    valid = torch.arange(9)[None] < torch.tensor([9, 4, 1])[:, None] if padded else None
    memory = Memory(source, torch.arange(7)[None] < torch.tensor([3, 7, 5])[:, None]) if kind != "decoder" else None
    y = run(x * 1, Context.begin(3, 9, valid=valid, memory=memory))
    y = y if valid is None else y[valid]
    (y * torch.randn_like(y)).sum().backward()
    found = {"y": y.detach(), "x": x.grad, "next": torch.rand(3)} | {n: p.grad for n, p in made.named_parameters()}
    found |= {n: b.clone() for n, b in made.named_buffers() if b.is_floating_point()}
    return found | ({"memory": source.grad} if memory else {})


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("norm", ["layer", "batch", {"part": "power", "warmup": 1}])
def test_reversible_gradients_are_those_of_the_plain_chain(norm, dropout, kind, padded):
    wiring = {"part": "reversible", "norm": norm, "dropout": dropout}
    found = []
    for through in (Stack.__call__, plain):
        made = stack(wiring, 3, kind)
        rounds = [gradients(lambda x, c, m=made, t=through: t(m, x, c), made, kind, padded, seed) for seed in (11, 12)]
        found.append({f"{i} {n}": t for i, one in enumerate(rounds) for n, t in one.items()})
    ours, want = found
    assert ours.keys() == want.keys()
    for name in want:
        assert want[name].any(), name
        torch.testing.assert_close(ours[name], want[name], rtol=0, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("depth", [1, 3])
def test_reversible_with_one_branch_and_shared_layers(depth):
    made = Stack(
        width=12,
        heads=3,
        depth=depth,
        layer={"mixer": {**SELF, "weight_dropout": 0.3}, "wiring": {"part": "reversible", "dropout": 0.2}},
        share="layers",
    ).double()
    ours = gradients(lambda x, c: made(x, c), made, "decoder", True)
    want = gradients(lambda x, c: plain(made, x, c), made, "decoder", True)
    for name in want:
        torch.testing.assert_close(ours[name], want[name], rtol=0, atol=1e-9)


def saved_bytes(made: Stack) -> int:
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    x = torch.randn(3, 9, 12, dtype=torch.float64, requires_grad=True)
    memory = Memory(torch.randn(3, 7, 12, dtype=torch.float64, requires_grad=True))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made(x, Context.begin(3, 9, memory=memory))
    return total


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_reversible_memory_does_not_grow_with_depth(kind):
    wiring = {"part": "reversible", "dropout": 0.1}
    assert saved_bytes(stack(wiring, 8, kind)) == saved_bytes(stack(wiring, 2, kind))
    assert saved_bytes(stack({"part": "pre"}, 8, kind)) > 3 * saved_bytes(stack({"part": "pre"}, 2, kind))  # it counts


def test_reversible_in_mixed_precision():
    """The backward runs in the precision of the forward, inside and outside of autocast."""
    want: list[Tensor] = []
    for through in (plain, Stack.__call__):
        for inside in (True, False):
            made = stack({"part": "reversible"}, 3).float()
            torch.manual_seed(2)
            x = torch.randn(3, 9, 12)
            with torch.autocast("cpu", torch.bfloat16):
                loss = through(made, x, Context.begin(3, 9)).square().sum()
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            found = [p.grad for p in made.parameters()]
            want = want or found
            for one, two in zip(found, want, strict=True):
                assert bool(((one - two).norm() < 0.05 * two.norm() + 1e-3).all())


def test_reversible_shows_its_taps():
    """A watched tap sees every layer once, and what it sees has a gradient."""
    made = stack({"part": "reversible"}, 3)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    with watch(made, "*weights") as seen:
        made(x, Context.begin(2, 5))
    assert [len(tensors) for tensors in seen.values()] == [1, 1, 1]
    assert all(tensors[0].requires_grad for tensors in seen.values())


def test_reversible_is_the_reformer_s_equations():
    """y1 = x1 + attention(norm(x2)), y2 = x2 + feedforward(norm(y1))."""
    layer, context = stack({"part": "reversible"}, 1).layers[0], Context.begin(2, 5)
    x1, x2 = torch.randn(2, 2, 5, 12, dtype=torch.float64)
    attention, feedforward = layer.calls(context)
    y1 = x1 + attention(layer.wiring.norms[0](x2))
    y2 = x2 + feedforward(layer.wiring.norms[1](y1))
    for one, two in zip(layer((x1, x2), context), (y1, y2), strict=True):
        torch.testing.assert_close(one, two)


def test_reversible_counts_a_weight_with_two_owners_once():
    made = stack({"part": "reversible"}, 2)
    for layer in made.layers:
        layer.branches["mixer"].k.weight = layer.branches["mixer"].v.weight
    ours = gradients(lambda x, c: made(x, c), made, "decoder", False)
    want = gradients(lambda x, c: plain(made, x, c), made, "decoder", False)
    for name in want:
        torch.testing.assert_close(ours[name], want[name], rtol=0, atol=1e-9)


def test_reversible_joins_as_the_reformer():
    made = stack({"part": "reversible", "join": "concat"}, 2)
    assert made.width == 24
    assert made(torch.randn(2, 5, 12, dtype=torch.float64), Context.begin(2, 5)).shape == (2, 5, 24)


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        ([{"mixer": SELF, "wiring": "reversible"}, {"mixer": SELF, "wiring": "pre"}], "needs the whole stack"),
        ([{"mixer": SELF, "wiring": {"part": "reversible", "join": "sum"}}], "must be 'mean' or 'concat'"),
        ([{"mixer": SELF, "wiring": {"part": "parallel", "norms": "none"}}], "must be 'shared' or 'separate'"),
        ([{"mixer": SELF, "wiring": "deep_norm"}], "did you mean 'deepnorm'"),
        ([{"mixer": SELF, "wiring": {"part": "rezero", "norm": "layer"}}], "rezero has no 'norm'"),
    ],
)
def test_bad_arguments(layer, sentence):
    with pytest.raises(UserError, match=sentence):
        Stack(width=12, heads=3, depth=2, layer=layer)
