"""Runs to export, and how their graphs and the code in their README are run."""

import re
from pathlib import Path

from regard.cli import main
from regard.ops.rotary import constant
from regard.pattern import analysis as pattern
from regard.runs.job import Job
from regard.train.job import start

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
LINES = [f"{a} {b} {c}" for a in WORDS for b in WORDS[:4] for c in WORDS[2:6]]
SMALL = [
    "model.width=24",
    "model.heads=2",
    "model.depth=2",
    "model.dropout=0",
    "train.batch_tokens=400",
    "train.lr=0.01",
]


def trained(tmp_path: Path, recipe: str, *sets: str, pairs: bool) -> Path:
    """A few steps, so that scores are not all alike."""
    if pairs:
        data = tmp_path / "data.tsv"
        data.write_text("".join(f"{line}\t{' '.join(reversed(line.split()))}\n" for line in LINES))
    else:
        data = tmp_path / "data.txt"
        data.write_text("".join(f"{line}\n\n" for line in LINES))
    job = Job(
        recipe, str(tmp_path / "run"), None,
        [*SMALL, "train.warmup=5", "train.steps=25", "train.context_length=12", *sets],
        str(data), dev="8" if pairs else None, tokenizer="words",
        as_published=True,
    )  # fmt: skip
    start(job, say=lambda sentence: None).train()
    return tmp_path / "run"


def exported(folder: Path, target: Path) -> None:
    """As in a process of its own, where nothing has been computed and kept before."""
    pattern._first_not_seeing_itself.cache_clear()
    pattern._slots.cache_clear()
    constant.cache_clear()
    assert main(["export", str(folder), str(target), "--to", "onnx"]) == 0


def session(path: Path):
    import onnxruntime

    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def call(graph, given: dict) -> dict:
    names = [one.name for one in graph.get_outputs()]
    found = graph.run(names, {one.name: given[one.name] for one in graph.get_inputs()})
    return {name.replace("present.", "past."): value for name, value in zip(names, found, strict=True)}


def shown(folder: Path, texts: list[str], monkeypatch, capsys) -> str:
    """What the Python code in the README prints for other texts than its own."""
    code = (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    for own, text in zip(re.findall(r'"(a text|another|a \S+ text)"', code), texts, strict=True):
        code = code.replace(f'"{own}"', f'"{text}"')
    capsys.readouterr()
    with monkeypatch.context() as patched:
        patched.chdir(folder)
        exec(compile(code, "README.md", "exec"), {})
    return capsys.readouterr().out.strip("\n")
