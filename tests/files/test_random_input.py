"""Random recipes and overrides end in a model or in one sentence, never in anything else."""

import copy

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import regard
from regard import UserError
from regard.core import Model

MINE = {
    "title": "Mine",
    "vocab": 61,
    "model": {
        "kind": "decoder",
        "width": 24,
        "heads": 3,
        "depth": 2,
        "embed": {"part": "tokens"},
        "layer": [{"mixer": {"part": "attention", "pattern": "causal"}, "feedforward": "mlp", "wiring": "pre"}],
    },
}
WORDS = (
    "attention gru mlp pre post plain layer none causal everything window(2 rotary sinusoidal shared decoder encoder "
    "encoder-decoder tokens layers all é"
)
KEYS = (
    "part kind width heads depth layer mixer cross feedforward wiring norm position pattern score embed head tie share "
    "dropout hidden kv_heads dim over bias encoder decoder kernel project place branches x a.b"
)
INSIDE = "kind width heads depth layer norm embed head tie share dropout position encoder decoder layer.0"
BRANCH = "mixer feedforward wiring cross mixer.part mixer.pattern mixer.position mixer.heads mixer.dim mixer.bias"
SLOTS = ["vocab", "size", "title", "model", *(f"model.{key}" for key in INSIDE.split())]
SLOTS += [f"model.layer.0.{key}" for key in (BRANCH + " mixer.norm mixer.score mixer.over").split()]

words = st.sampled_from([*WORDS.split(), "", "causal & window(2)"])
plain = st.none() | st.booleans() | st.integers(-3, 30) | st.floats(-2, 3) | words
values = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS.split()), inner, max_size=4),
    max_leaves=8,
)
often = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))


def place(table: dict, path: str, value: object) -> None:
    *outer, last = path.split(".")
    here = table
    for key in outer:
        here = here[0 if key == "0" else key]
    here[0 if last == "0" else last] = value


def outcome(recipe: dict, overrides: tuple[str, ...] = ()) -> str:
    """Empty for a model. A warning, which is an error in these tests, passes through."""
    try:
        assert isinstance(regard.build(recipe, overrides=overrides), Model)
    except UserError as error:
        return str(error)
    return ""


@often
@given(st.lists(st.tuples(st.sampled_from(SLOTS), values), min_size=1, max_size=2))
def test_random_tables(changes):
    made = copy.deepcopy(MINE)
    for path, value in sorted(changes, key=lambda change: -change[0].count(".")):  # the innermost first
        place(made, path, value)
    assert "\n" not in outcome(made)


@often
@given(
    st.lists(st.one_of(st.sampled_from(SLOTS), st.text("model.yr0=[{'\n", max_size=12)), min_size=1, max_size=2),
    st.sampled_from(["=", "", " = ", "=="]),
    st.one_of(st.text("0123.-+{}[]\"'=ae#\n ", max_size=10), values.map(str), words.map(repr)),
)
def test_random_overrides(paths, equals, value):
    assert "\n" not in outcome(MINE, tuple(f"{path}{equals}{value}" for path in paths))
