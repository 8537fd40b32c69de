"""The special tokens that tell a speech model what to do, and those for timestamps: Whisper's, where it has them.

<|startoftranscript|> <|en|> <|transcribe|> <|notimestamps|>      or without the last, for timestamps: <|0.00|> ...
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from regard.core import UserError
from regard.data.tokenizer import Tokenizer
from regard.decode.result import LogitsProcessor
from regard.decode.rules import compose, suppress, suppress_at_begin, timestamps
from regard.errors import nearest
from regard.files.reading import Natural, check_type, read_json
from regard.runs.folder import read_run_json

LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
TASKS = ("transcribe", "translate")
GENERATION_CONFIG = Path("origin", "generation_config.json")


class Generation(TypedDict, total=False):
    """The entries of generation_config.json, or of config.json, that are read."""

    decoder_start_token_id: Natural | None
    no_timestamps_token_id: Natural
    lang_to_id: dict[str, Natural] | None
    task_to_id: dict[str, Natural] | None
    is_multilingual: bool
    suppress_tokens: list[int] | None
    begin_suppress_tokens: list[int] | None
    max_initial_timestamp_index: Natural | None


class SpeechTokens(NamedTuple):
    """The ids of the special tokens. A model without them has only a start and an end."""

    start: int
    end: int
    languages: dict[str, int] = {}
    tasks: dict[str, int] = {}
    no_timestamps: int | None = None  # asks for no timestamps; the ids after it are the timestamps, 0.02 s apart
    no_speech: int | None = None
    suppressed: Sequence[int] = ()
    suppressed_first: Sequence[int] = ()
    max_initial_timestamp: int | None = None  # the latest timestamp at which an answer may begin, in steps of 0.02 s

    @classmethod
    def of(cls, tokenizer: Tokenizer, folder: Path | None = None) -> SpeechTokens:
        """Return the special tokens by their names, and by generation_config.json."""
        config, number = _generation_config(folder), tokenizer.inner.token_to_id
        start = config.get("decoder_start_token_id")
        start = number("<|startoftranscript|>") if start is None else start
        no_timestamps = config.get("no_timestamps_token_id", number("<|notimestamps|>"))
        if start is None or no_timestamps is None:
            return cls(tokenizer.start, tokenizer.end)
        names = {f"<|{task}|>": task for task in TASKS}
        languages = config.get("lang_to_id") or {
            n: i for n, i in tokenizer.inner.get_vocab().items() if i < no_timestamps
        }
        languages = {found[1]: i for name, i in languages.items() if (found := LANGUAGE.fullmatch(name))}
        tasks = config.get("task_to_id") or {task: i for name, task in names.items() if (i := number(name)) is not None}
        if not config.get("is_multilingual", True):
            languages, tasks = {}, {}
        listed = (config.get(name) or () for name in ("suppress_tokens", "begin_suppress_tokens"))
        suppressed = [[token for token in some if token >= 0] for some in listed]
        return cls(start, tokenizer.end, languages, tasks, no_timestamps, no_timestamps - 1, *suppressed,
                   max_initial_timestamp=config.get("max_initial_timestamp_index"))  # fmt: skip

    @property
    def zero(self) -> int | None:
        """Return the id of timestamp 0; None: the model has no timestamps."""
        return None if self.no_timestamps is None else self.no_timestamps + 1

    def prompt(self, language: int | None, task: str, timed: bool) -> list[int]:
        """Return the token ids that precede an answer."""
        config = [self.start] + ([language] if language is not None else [])
        config += [self.tasks[task]] if task in self.tasks else []
        return config if timed or self.no_timestamps is None else [*config, self.no_timestamps]

    def language(self, name: str) -> int:
        if not self.languages:
            raise UserError("this model is for one language, so there is none to choose")
        if name not in self.languages:
            raise UserError(f"this model does not know the language '{name}'{nearest(name, self.languages)}")
        return self.languages[name]

    def check(self, task: str) -> None:
        if task not in TASKS:
            raise UserError(f"unknown task '{task}'{nearest(task, TASKS)}")
        if task != TASKS[0] and task not in self.tasks:
            raise UserError("this model only transcribes: it was not made to translate")

    def rule(self, timed: bool) -> LogitsProcessor | None:
        rules = [suppress_at_begin(self.suppressed_first)] if self.suppressed_first else []
        rules += [suppress(self.suppressed)] if self.suppressed else []
        if timed:
            assert self.no_timestamps is not None
            assert self.zero is not None
            rules += [suppress([self.no_timestamps]), timestamps(self.zero, self.end, self.max_initial_timestamp)]
        return compose(rules)


def _generation_config(folder: Path | None) -> dict[str, Any]:
    """Return the entries of config.json of a converted model, overridden by those of generation_config.json."""
    if folder is None:
        return {}
    origin = read_run_json(folder).get("origin") if (folder / "run.json").is_file() else None
    config = origin.get("config", {}) if origin else {}
    check_type(config, Generation)
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return config
    return config | read_json(path, Generation)
