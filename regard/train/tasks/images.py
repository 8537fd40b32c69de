"""Pictures with a label each: an encoder of patches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from regard.core import Model, UserError
from regard.data import Tokenizer, once
from regard.data.images import Lens, usual
from regard.data.pictures import Pictures, Seen, Shown, open_pictures, prepare_pictures
from regard.parts.objectives.classify import Classify
from regard.parts.objectives.objective import Objective
from regard.use.images import ImageLabeller, measured

from .task import DEV_TOKENS, Say, Task, Tick, silent, unseen


class Images(Task):
    reads = "images"
    forced = ("loss", "accuracy")
    decisive = "accuracy"
    files = "images"

    @property
    def tokenizers(self) -> list[Tokenizer]:
        return []

    def open(self, tick: Callable[[int], None]) -> Any:
        job = self.job
        for name in ("source", "target", "columns", "header", "tokenizer"):
            if getattr(job, name) is not None:
                raise UserError(f"pictures have their label from their folder, so there is no {name} to give")
        if job.data is None:
            raise UserError("which pictures? Give data=, a folder with a folder for each class, or an .npz file")
        self.pictures = open_pictures(job.data, job.dev, job.test, self.settings.seed)
        self.labels = self.pictures.labels
        return self.pictures

    def learn(self, corpus: Any, tick: Tick) -> None:
        """Pictures have no tokens."""

    def complete(self, recipe: dict[str, Any]) -> None:
        recipe.setdefault("vocab", 1)
        head = recipe["model"].get("head", "classify")
        recipe["model"]["head"] = ({"part": head} if isinstance(head, str) else head) | {"classes": len(self.labels)}

    def fit(self, model: Model) -> None:
        self.lens: Lens = usual(model.embed.sides, model.embed.channels)  # type: ignore[union-attr]

    def about(self) -> dict[str, Any]:
        return {"labels": self.labels, "images": self.lens.table()}

    def objective(self) -> Objective:
        return Classify(self.settings.label_smoothing)

    def batches(self, model: Model, corpus: Pictures, say: Say, tick: Tick) -> Any:
        s = self.settings
        rows = s.batch_size or s.batch_tokens // model.embed.count  # type: ignore[operator]
        return Seen(self._prepared(corpus.train, "train.images", say, tick), self.lens, rows, s.seed)

    def dev(self, model: Model, lines: Any) -> Any:
        rows = self._prepared(lines, "dev.images", silent, unseen)
        seen = Seen(rows, self.lens, DEV_TOKENS // model.embed.count, 0, shuffle=False)  # type: ignore[operator]
        return lambda model: measured(model, once(seen), next(model.parameters()).device)  # type: ignore[arg-type]

    def _prepared(self, shown: Shown, name: str, say: Say, tick: Tick) -> Any:
        numbers = {label: number for number, label in enumerate(self.labels)}
        for label in shown.answers:
            if label not in numbers:
                raise UserError(f"{shown.name}: the class '{label}' stands nowhere in the training data")
        answers, skip = (numbers[label] for label in shown.answers), self.job.bad_lines == "skip"
        rows, lost = prepare_pictures(shown, answers, self.lens, self.data(name), skip, partial(tick, "preparing"))
        if lost:
            say(f"{shown.name}: {lost:,} pictures cannot be read and are left out")
        return rows

    def run(self, model: Model, folder: Path | None, documents: bool) -> Any:
        return ImageLabeller(model, folder, lens=self.lens, labels=self.labels)
