import pytest
import torch

from regard.core import Dropout


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.97])
def test_keeps_the_share_and_the_mean(rate):
    torch.manual_seed(0)
    y = Dropout(rate)(torch.ones(400, 501))
    kept = y[y != 0]
    assert abs(len(kept) / y.numel() - (1 - rate)) < 0.005
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - rate)), rtol=1e-3, atol=0)
    assert abs(float(y.mean()) - 1) < 0.05


def test_channels_are_dropped_one_by_one():
    """Four of them come from one draw: that one is kept says nothing about the next."""
    torch.manual_seed(0)
    kept = (Dropout(0.5)(torch.ones(100_003)) != 0).float()
    for step in (1, 2, 3, 4, 5):
        assert abs(float((kept[step:] * kept[:-step]).mean()) - 0.25) < 0.01


def test_the_gradient_goes_where_the_value_went():
    x = torch.randn(3, 7, 5, dtype=torch.float64, requires_grad=True)
    y = Dropout(0.4)(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad * x, y)
    assert 0 < int((y == 0).sum()) < y.numel()


def test_the_same_seed_drops_the_same():
    def once():
        torch.manual_seed(5)
        return Dropout(0.5)(torch.ones(3, 7))

    assert torch.equal(once(), once())


def test_does_nothing_outside_training_or_at_rate_0():
    x = torch.randn(3, 7)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x


def test_nothing_to_drop():
    assert Dropout(0.5)(torch.ones(0, 3)).shape == (0, 3)


def test_what_is_added_at_once():
    """The same as the sum, gradients too; in double, and of shapes that broadcast."""

    def grads(join) -> list[torch.Tensor]:
        torch.manual_seed(7)
        stream, x = (torch.randn(5, 31, dtype=torch.float64, requires_grad=True) for _ in range(2))
        y = join(Dropout(0.3), stream, x)
        return [y, *torch.autograd.grad((y * torch.arange(31)).sum(), (stream, x))]

    for one, two in zip(
        grads(lambda drop, stream, x: drop.add(stream, x)), grads(lambda drop, stream, x: stream + drop(x)), strict=True
    ):
        torch.testing.assert_close(one, two)
    x = torch.ones(3, 4)
    assert torch.equal(Dropout(0.3).eval().add(x, x), 2 * x)
    assert Dropout(0.3).add(x[:1], x).shape == (3, 4)


def test_a_compiled_model_learns():
    """What draws four numbers at once is not for compilers: they have a way of their own."""
    drop = torch.compile(Dropout(0.5).train(), backend="aot_eager")
    x = torch.ones(64, 32, requires_grad=True)
    y = drop(x)
    y.sum().backward()
    kept = y != 0
    assert 0.3 < kept.float().mean() < 0.7
    torch.testing.assert_close(x.grad, torch.where(kept, 2.0, 0.0))
