"""Tasks are found by their files: every recipe has exactly one, and a model's is the one that it was trained for."""

import pytest

from regard.core import UserError
from regard.files import recipe as recipes
from regard.tasks import every_task, predictor_for, task_of
from regard.tasks.classify import Labels, TextClassifier
from regard.tasks.embed import Embedder
from regard.tasks.images import ImageClassifier, Images
from regard.tasks.run import Run
from regard.tasks.text import Text
from regard.tasks.translate import Pairs


class Built:
    """The attributes of a model that `predictor_for` reads."""

    def __init__(self, objective, reads="text"):
        self.recipe = {"objective": {"part": objective}}
        self.embed = type("Reading", (), {"reads": reads})


def test_no_two_tasks_are_for_the_same():
    told = [(task.objective_name, task.kind, task.inputs) for task in every_task()]
    assert len(told) > 10
    assert len(set(told)) == len(told)


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_has_a_task(name):
    recipe = recipes.load(name)
    if recipe["objective"]["part"] == "embed":
        with pytest.raises(UserError, match="cannot learn"):
            task_of(recipe, name)
    else:
        assert task_of(recipe, name).learns(recipe["objective"]["part"])


def test_kind_and_input_decide():
    def found(objective, kind, embed="tokens"):
        return task_of({"objective": {"part": objective}, "model": {"kind": kind, "embed": embed}}, "mine")

    assert found("next_token", "encoder-decoder") is Pairs
    assert found("next_token", "decoder") is Text
    assert found("classify", "encoder") is found("classify", "decoder") is Labels
    assert found("classify", "encoder", {"part": "patches"}) is Images
    for objective, kind in (("next_token", "encoder"), ("masked", "decoder"), ("guess", "decoder")):
        with pytest.raises(UserError, match=f"has the objective '{objective}', which a model of kind '{kind}'"):
            found(objective, kind)


def test_predictors():
    assert predictor_for(Built("next_token")) is predictor_for(Built("segments")) is Run
    assert predictor_for(Built("classify")) is predictor_for(Built("classify", "sounds")) is TextClassifier
    assert predictor_for(Built("classify", "images")) is ImageClassifier
    assert predictor_for(Built("embed")) is Embedder
    for objective in ("clasify", 3, ["classify"]):
        with pytest.raises(UserError, match=r"objective\.part is .*, which is unknown"):
            predictor_for(Built(objective))
