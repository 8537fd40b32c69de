"""What a model refuses."""

import pytest
import torch

import regard
from regard.core import recipe as recipes


def test_a_state_of_another_model_is_refused():
    """Of another kind, depth or width; one that fits is not the cause of what else goes wrong."""
    made = {}
    for name, base, changes in (
        ("attention", "transformer-decoder", []),
        ("shallow", "transformer-decoder", ["model.depth=2"]),
        ("retention", "retnet", []),
        ("narrow", "retnet", ["model.width=64"]),
        ("system", "s4d", []),
        ("narrow system", "s4d", ["model.width=64"]),
        ("pairs", "transformer", []),
        ("recurrent", "seq2seq-bahdanau", []),
    ):
        made[name] = regard.build(recipes.load(base, "tiny", changes) | {"vocab": 17})
    tokens = torch.randint(17, (2, 3))

    def start(model):
        return model.start(2, 5, source=tokens if model.encoder is not None else None)

    for one, two in (("attention", "retention"), ("retention", "attention"), ("attention", "shallow"),
                     ("retention", "narrow"), ("system", "narrow system"),
                     ("pairs", "recurrent"), ("recurrent", "pairs")):  # fmt: skip
        with pytest.raises(regard.UserError, match="another model"):
            made[one].step(tokens, start(made[two]))
    with pytest.raises(regard.UserError, match="not from NoneType"):
        made["attention"].step(tokens, None)
