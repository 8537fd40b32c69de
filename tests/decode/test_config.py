"""How to decode, as a recipe or a command line says it."""

import pytest

from regard.core import UserError
from regard.decode import DecodeConfig, beam, greedy, sample, search

from .toy import Toy, ask

PROMPTS = [[1], [2, 1, 3], [3, 3]]


def test_nothing_said_is_greedy():
    assert DecodeConfig.read({}) == DecodeConfig()
    assert search(Toy(9), ask(PROMPTS, 8), DecodeConfig()) == [[answer] for answer in greedy(Toy(9), ask(PROMPTS, 8))]


def test_what_is_said_is_done():
    toy, request = Toy(9, 2, ends=1.0), ask(PROMPTS, 8)
    config = DecodeConfig(beam=4, num_return=2, length_penalty=0.3, early_stopping="never")
    assert search(toy, request, config) == beam(toy, request, 4, 0.3, 2, early_stopping="never")
    config = DecodeConfig(temperature=1.5, top_k=6, top_p=0.95, min_p=0.01, repetition_penalty=1.1)
    seeds = [1, 2, 3]
    wanted = sample(toy, request, 1.5, 6, 0.95, 0.01, 1.1, seeds)
    assert search(toy, request, config, seeds) == [[answer] for answer in wanted]


def test_a_table_changes_what_it_names():
    recipe = DecodeConfig.read({"beam": 5, "length_penalty": 0.6, "max_new_tokens": 30})
    assert (recipe.beam, recipe.length_penalty, recipe.max_new_tokens, recipe.early_stopping) == (5, 0.6, 30, "full")
    changed = DecodeConfig.read({"max_new_tokens": 7}, recipe)
    assert (changed.beam, changed.length_penalty, changed.max_new_tokens) == (5, 0.6, 7)


def test_sampling_turns_from_beam_search_and_back():
    recipe = DecodeConfig.read({"beam": 5, "num_return": 2})
    drawn = DecodeConfig.read({"temperature": 0.8, "top_k": 9}, recipe)
    assert (drawn.beam, drawn.num_return, drawn.temperature, drawn.top_k) == (1, 1, 0.8, 9)
    assert DecodeConfig.read({"repetition_penalty": 1.2}, recipe).beam == 1
    assert DecodeConfig.read({"beam": 1}, recipe) == DecodeConfig()
    assert DecodeConfig.read({"beam": 3}, drawn) == DecodeConfig(beam=3)
    assert DecodeConfig.read({"temperature": 0}, drawn) == DecodeConfig()
    assert DecodeConfig.read({"num_return": 3}, drawn) == DecodeConfig(beam=3, num_return=3)
    assert DecodeConfig.read({"num_return": 3}, recipe) == DecodeConfig(beam=5, num_return=3)
    assert DecodeConfig.read({"top_p": 0.9}, drawn) == DecodeConfig(temperature=0.8, top_k=9, top_p=0.9)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"beem": 5}, "decode has no 'beem'; did you mean 'decode.beam'?"),
        ({"beam": "five"}, "decode.beam must be a whole number, not 'five'"),
        ({"beam": 2.5}, "decode.beam must be a whole number"),
        ({"early_stopping": "early"}, "decode.early_stopping must be full, heuristic or never, not 'early'"),
        ({"seed": 1.5}, "decode.seed must be a whole number"),
        ({"beam": 0}, "decode.beam must be at least 1, not 0"),
        ({"max_new_tokens": -1}, "decode.max_new_tokens must be at least 0"),
        ({"temperature": -0.5}, "must not be negative"),
        ({"seed": -3}, "must not be negative"),
        ({"temperature": 1.0, "top_p": 1.5}, "decode.top_p must be above 0 and up to 1"),
        ({"beam": 2, "num_return": 3}, "3 answers for each input need a beam of at least 3, not 2"),
        ({"beam": 4, "temperature": 1.0}, "beam search takes no temperature"),
        ({"beam": 4, "repetition_penalty": 1.5}, "beam search takes no temperature and no repetition"),
        ({"top_k": 4}, "give decode.temperature as well"),
        ([("beam", 5)], "[decode] is a table"),
    ],
)
def test_what_makes_no_sense_is_refused(table, words):
    with pytest.raises(UserError) as told:
        DecodeConfig.read(table)
    assert words in str(told.value)
