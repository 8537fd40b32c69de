"""How to decode, as a recipe or a command line says it."""

import pytest

from regard.core import UserError
from regard.decode import Way, beam, greedy, sample, search

from .toy import Toy, ask

PROMPTS = [[1], [2, 1, 3], [3, 3]]


def test_nothing_said_is_greedy():
    assert Way.read({}) == Way()
    assert search(Toy(9), ask(PROMPTS, 8), Way()) == [[answer] for answer in greedy(Toy(9), ask(PROMPTS, 8))]


def test_what_is_said_is_done():
    toy, request = Toy(9, 2, ends=1.0), ask(PROMPTS, 8)
    way = Way(beam=4, best=2, penalty=0.3, stop="sure")
    assert search(toy, request, way) == beam(toy, request, 4, 0.3, 2, stop="sure")
    way = Way(temperature=1.5, top_k=6, top_p=0.95, min_p=0.01, repetition=1.1)
    seeds = [1, 2, 3]
    wanted = sample(toy, request, 1.5, 6, 0.95, 0.01, 1.1, seeds)
    assert search(toy, request, way, seeds) == [[answer] for answer in wanted]


def test_a_table_changes_what_it_names():
    recipe = Way.read({"beam": 5, "penalty": 0.6, "most": 30})
    assert (recipe.beam, recipe.penalty, recipe.most, recipe.stop) == (5, 0.6, 30, "full")
    changed = Way.read({"most": 7}, recipe)
    assert (changed.beam, changed.penalty, changed.most) == (5, 0.6, 7)


def test_sampling_turns_from_beam_search_and_back():
    recipe = Way.read({"beam": 5, "best": 2})
    drawn = Way.read({"temperature": 0.8, "top_k": 9}, recipe)
    assert (drawn.beam, drawn.best, drawn.temperature, drawn.top_k) == (1, 1, 0.8, 9)
    assert Way.read({"repetition": 1.2}, recipe).beam == 1
    assert Way.read({"beam": 1}, recipe) == Way()
    assert Way.read({"beam": 3}, drawn) == Way(beam=3)
    assert Way.read({"temperature": 0}, drawn) == Way()
    assert Way.read({"best": 3}, drawn) == Way(beam=3, best=3)
    assert Way.read({"best": 3}, recipe) == Way(beam=5, best=3)
    assert Way.read({"top_p": 0.9}, drawn) == Way(temperature=0.8, top_k=9, top_p=0.9)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"beem": 5}, "decode has no 'beem'; did you mean 'decode.beam'?"),
        ({"beam": "five"}, "decode.beam must be a whole number, not 'five'"),
        ({"beam": 2.5}, "decode.beam must be a whole number"),
        ({"stop": "early"}, "decode.stop must be full, likely or sure, not 'early'"),
        ({"seed": 1.5}, "decode.seed must be a whole number"),
        ({"beam": 0}, "decode.beam must be at least 1, not 0"),
        ({"most": -1}, "decode.most must be at least 0"),
        ({"temperature": -0.5}, "must not be negative"),
        ({"seed": -3}, "must not be negative"),
        ({"temperature": 1.0, "top_p": 1.5}, "decode.top_p must be above 0 and up to 1"),
        ({"beam": 2, "best": 3}, "3 answers for each input need a beam of at least 3, not 2"),
        ({"beam": 4, "temperature": 1.0}, "beam search takes no temperature"),
        ({"beam": 4, "repetition": 1.5}, "beam search takes no temperature and no repetition"),
        ({"top_k": 4}, "give decode.temperature as well"),
        ([("beam", 5)], "[decode] is a table"),
    ],
)
def test_what_makes_no_sense_is_refused(table, words):
    with pytest.raises(UserError) as told:
        Way.read(table)
    assert words in str(told.value)
