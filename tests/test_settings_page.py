"""Every setting can be found: on its page, in the command that prints it, and from a wrong name."""

import dataclasses
import inspect
from pathlib import Path

import pytest

import regard
from regard.cli import main
from regard.core import Model, UserError
from regard.decode import DecodeConfig
from regard.runs.job import Job
from regard.runs.settings import Settings
from regard.synonyms import SYNONYMS
from regard.train.job import start

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"


def keys():
    model = [f"model.{name}" for name in inspect.signature(Model).parameters]
    return model + [
        f"{one}.{f.name}" for one, of in (("train", Settings), ("decode", DecodeConfig)) for f in dataclasses.fields(of)
    ]


def rows(text):
    """The cells of each line about a key: key, type, default and meaning."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells[1:] for cells in lines}


def test_the_page_is_what_the_command_prints(capsys):
    assert main(["settings", "--markdown"]) == 0
    assert capsys.readouterr().out == PAGE.read_text(encoding="utf-8"), (
        "write it: regard settings --markdown > docs/settings.md"
    )


def test_the_page_tells_everything_about_every_key():
    told = rows(PAGE.read_text(encoding="utf-8"))
    assert list(told) == keys()
    for key, cells in told.items():
        assert len(cells) == 3, key
        kind, _, meaning = cells
        assert kind, key
        assert len(meaning) > 5, key
    assert told["train.lr"][:2] == ["float", "`0.001`"]
    assert "peak" in told["train.lr"][2]
    assert told["model.width"][:2] == ["int", "required"]
    assert told["decode.seed"][:2] == ["int or None", "`None`"]


def test_the_command_shows_them(capsys):
    assert main(["settings"]) == 0
    told = capsys.readouterr().out
    assert all(key in told for key in keys())


def test_synonyms_are_names_of_keys():
    assert set(SYNONYMS.values()) <= {*keys(), "vocab"}
    for name, key in SYNONYMS.items():
        assert key.endswith(f".{name}") or name not in {one.partition(".")[2] for one in keys()}


WRONG = {
    "train.learning_rate=3": "train.lr",
    "learning_rate=3": "train.lr",
    "train.per_device_train_batch_size=3": "train.batch_size",
    "train.num_train_epochs=3": "train.epochs",
    "train.warmup_steps=3": "train.warmup",
    "train.max_steps=3": "train.steps",
    "train.label_smoothing_factor=0.1": "train.label_smoothing",
    "train.gradient_accumulation_steps=2": "train.gradient_accumulation",
    "train.clip=1": "train.max_grad_norm",
    "train.lrr=3": "train.lr",
    "train.weight_deca=3": "train.weight_decay",
    "train.dropout=0.1": "model.dropout",
    "model.droput=0.1": "model.dropout",
    "model.hidden_size=8": "model.width",
    "model.lr=0.1": "train.lr",
    "model.num_beams=3": "decode.beam",
    "decode.num_beams=3": "decode.beam",
    "decode.temprature=0.5": "decode.temperature",
}


@pytest.mark.parametrize("text", WRONG)
def test_an_unknown_key_is_refused_with_the_near_ones(text, tmp_path):
    (tmp_path / "text.txt").write_text("some text\n" * 200)
    overrides = ["train.steps=1", "train.context_length=8", text]
    with pytest.raises(UserError) as caught:
        start(
            Job(
                "transformer-decoder",
                str(tmp_path / "run"),
                "tiny",
                overrides,
                str(tmp_path / "text.txt"),
                as_published=True,
            )
        )
    told = str(caught.value)
    assert f"did you mean '{WRONG[text]}'" in told
    assert "\n" not in told


def test_a_key_without_its_section_is_told_where_settings_stand():
    with pytest.raises(UserError, match=r"no entry 'lr'; did you mean 'train.lr'"):
        regard.build("gpt2", "tiny", 50, ["lr=3"])
    with pytest.raises(UserError, match=r"no entry 'beta1'.*train.KEY, model.KEY or decode.KEY"):
        regard.build("gpt2", "tiny", 50, ["beta1=3"])
