"""The settings in [train] are checked before training begins."""

import pytest

from regard import UserError
from regard.runs.settings import Settings


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"stepz": 3}, "did you mean 'train.steps'"),
        ({"lr": "high"}, "train.lr must be a number"),
        ({"lr": float("nan")}, "train.lr must be a number"),
        ({"minutes": float("inf")}, "train.minutes must be a number"),
        ({"steps": -1}, "train.steps must not be"),
        ({"batch_tokens": 0}, "train.batch_tokens must be at least 1"),
        ({"ema": 1.0}, "train.ema must be from 0 to below 1"),
        ({"label_smoothing": 1.5}, "train.label_smoothing must be from 0 to below 1"),
        ({"min_lr_ratio": 2.0}, "train.min_lr_ratio is a share"),
        ({"optimizer": "adamm"}, "did you mean 'adam"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"precision": "float16"}, "train.precision 'float16' is unknown"),
        ({"gradient_checkpointing": 1}, "train.gradient_checkpointing must be true or false"),
    ],
)
def test_refused(table, told):
    with pytest.raises(UserError, match="train") as error:
        Settings.read(table)
    assert told in str(error.value)


def test_another_end():
    old = Settings(steps=60, minutes=2.0, lr=0.5)
    new = old.until({"epochs": 3})
    assert (new.steps, new.minutes, new.epochs, new.lr) == (0, 0, 3, 0.5)
    with pytest.raises(UserError, match="not in 'lr'"):
        old.until({"lr": 3})
    with pytest.raises(UserError, match="must not be negative"):
        old.until({"steps": -3})


def test_all_of_it_is_documented():
    for name in Settings.__dataclass_fields__:
        assert name in Settings.__doc__, name
