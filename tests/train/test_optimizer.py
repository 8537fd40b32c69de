"""The optimizers: what each takes, clipping, and a state that can be put away and taken up again."""

import pytest
import torch

from regard import UserError
from regard.runs.settings import OPTIMIZERS, Settings
from regard.train.muon import Muon, orthogonalize
from regard.train.optimizer import Optimizer


def learn(model, optimizer, steps, seed):
    """A few steps on something."""
    rng = torch.Generator().manual_seed(seed)
    model.eval()
    for _ in range(steps):
        tokens = torch.randint(13, (2, 5), generator=rng)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step(0.01, float(optimizer.norm()))


def weights(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state(model, kind):
    """The same steps follow from a state, and none of what came after it is left."""
    settings = Settings(optimizer=kind, weight_decay=0.01)
    one, other = model(0), model(1)
    first, second = Optimizer(one, settings), Optimizer(other, settings)
    learn(one, first, 3, seed=0)
    state = {name: tensor.clone() for name, tensor in first.state().items()}
    assert state
    kept = {name: tensor.clone() for name, tensor in one.state_dict().items()}
    before = weights(one)
    learn(one, first, 3, seed=1)
    assert not torch.equal(weights(one), before)
    learn(other, second, 2, seed=5)
    for used in (second, Optimizer(other, settings)):
        other.load_state_dict(kept)
        used.restore(state)
        assert torch.equal(weights(other), before)
        learn(other, used, 3, seed=1)
        assert torch.equal(weights(one), weights(other))
    from_start = model(1)
    learn(from_start, Optimizer(from_start, settings), 2, seed=5)
    other.load_state_dict(model(1).state_dict())
    second.restore({})
    learn(other, second, 2, seed=5)
    assert torch.equal(weights(from_start), weights(other)), "moments from before are gone"


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_learns(model, kind):
    one = model()
    one.eval()
    tokens = torch.randint(13, (3, 5), generator=torch.Generator().manual_seed(0))

    def loss():
        return torch.nn.functional.cross_entropy(one(tokens).flatten(0, 1), tokens.flatten())

    optimizer = Optimizer(one, Settings(optimizer=kind))
    before = float(loss().detach())
    for _ in range(20):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step(0.03, float(optimizer.norm()))
    assert float(loss().detach()) < before - 0.2


def test_adam_is_torch_s(model):
    """With clipping, and without decay of vectors."""
    one, other = model(), model()
    optimizer = Optimizer(
        one, Settings(optimizer="adamw", max_grad_norm=0.01, weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-6)
    )
    flat = [p for p in other.parameters() if p.dim() <= 1]
    deep = [p for p in other.parameters() if p.dim() > 1]
    groups = [{"params": deep, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, 0.01, (0.8, 0.9), 1e-6, fused=False)
    learn(one, optimizer, 3, seed=0)
    rng = torch.Generator().manual_seed(0)
    other.eval()
    for _ in range(3):
        tokens = torch.randint(13, (2, 5), generator=rng)
        plain.zero_grad()
        torch.nn.functional.cross_entropy(other(tokens).flatten(0, 1), tokens.flatten()).backward()
        assert torch.nn.utils.clip_grad_norm_(other.parameters(), 0.01) > 0.01
        plain.step()
    torch.testing.assert_close(weights(one), weights(other))


@pytest.mark.parametrize(("clip", "wanted"), [(0.5, 0.5), (0.0, 5.0), (7.0, 5.0)])
def test_clips(model, clip, wanted):
    one = model()
    optimizer = Optimizer(one, Settings(optimizer="sgd", beta1=0.0, max_grad_norm=clip))
    before = weights(one)
    for p in one.parameters():
        p.grad = torch.zeros_like(p)
    one.embed.table.grad[0, 0], one.embed.table.grad[1, 1] = 3.0, 4.0
    norm = float(optimizer.norm())
    assert norm == 5
    optimizer.step(1.0, norm)
    assert float((weights(one) - before).norm()) == pytest.approx(wanted, rel=1e-5)


def test_muon_takes_the_maps(model):
    one = model()
    muon, adamw = Optimizer(one, Settings(optimizer="muon")).optimizers
    names = {id(p): name for name, p in one.named_parameters()}
    taken = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    rest = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert taken | rest == set(names.values())
    assert all(name.endswith("weight") and name.startswith("stack") for name in taken)
    assert "embed.table" in rest


def test_of_another_model(model):
    optimizer = Optimizer(model(), Settings())
    with pytest.raises(UserError, match="it has 'elsewhere'"):
        optimizer.restore({"elsewhere/step": torch.tensor(1.0)})


def test_what_does_not_decay():
    """With a gradient of zero, only weight decay moves anything: matrices, not vectors, nor what a part has marked."""
    import regard

    model = regard.build("s4", size="tiny", vocab=13)
    optimizer = Optimizer(model, Settings(optimizer="adamw", weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step(0.1, 0.0)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all(before[name].dim() > 1 for name in moved)
    assert not {name for name in moved if name.rpartition(".")[2] in ("log_real", "imag", "b", "c", "p")}


def test_orthogonal():
    """The rounds as they are written in the paper, matrix by matrix; nothing comes of nothing."""
    rng = torch.Generator().manual_seed(0)
    matrices = [torch.randn(shape, generator=rng) for shape in ((6, 6), (6, 15), (15, 6), (6, 40))]
    for matrix, found in zip(matrices, orthogonalize(matrices), strict=True):
        x = matrix.double() / matrix.double().norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x - (4.7750 * gram - 2.0315 * gram @ gram) @ x
        torch.testing.assert_close(found.double(), x, rtol=1e-4, atol=1e-4)
        assert torch.linalg.svdvals(found).max() < 1.3
    assert orthogonalize([torch.zeros(3, 4)])[0].eq(0).all()


def test_muon_as_torch():
    """Several steps end where torch's own do, but for its bfloat16."""
    rng = torch.Generator().manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape, generator=rng)) for shape in ((8, 8), (8, 24), (24, 8), (12, 30))]
    theirs = [torch.nn.Parameter(one.detach().clone()) for one in ours]
    groups = [{"params": ours, "weight_decay": 0.1}]
    one, other = Muon(groups, 0.02), torch.optim.Muon(theirs, 0.02, 0.1, adjust_lr_fn="match_rms_adamw")
    begun = torch.cat([p.detach().flatten() for p in ours])
    for _ in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=rng)
            b.grad = a.grad.clone()
        one.step()
        other.step()
    config, wanted = (torch.cat([p.detach().flatten() for p in some]) - begun for some in (ours, theirs))
    assert (config - wanted).norm() < 0.02 * wanted.norm()
