"""Translate: an encoder-decoder learns from pairs of source and target, and generates the target of a source."""

from __future__ import annotations

from regard import metrics as measures
from regard.core import Model, UserError
from regard.data import Batches, BucketedBatches, Corpus, CorpusSplit, first_epoch
from regard.data.batches import Fertilities, SequenceDataset

from .dev import Dev, group_references
from .task import DEV_TOKENS, Say, Task, Tick, no_progress, say_nothing


class Pairs(Task):
    objective_name = "next_token"
    kind = "encoder-decoder"
    answer_metrics = measures.TEXT_METRICS

    def learn_tokenizers(self, corpus: Corpus, tick: Tick) -> None:
        kinds = (self.job.tokenizer or self.default_tokenizer).split(",")
        if len(kinds) == 1:
            return super().learn_tokenizers(corpus, tick)
        if len(kinds) > 2:
            raise UserError(
                f"tokenizer '{self.job.tokenizer}': one for both sides, or two with a comma between, not {len(kinds)}"
            )
        self.source, self.target = (self.tokenizer(corpus, kind, tick, side) for side, kind in enumerate(kinds))

    def batches(self, model: Model, corpus: Corpus, say: Say, tick: Tick) -> Batches:
        s, data = self.settings, self.prepare(model, corpus.train, "train.arrow", say, tick)
        return BucketedBatches(
            data, s.batch_tokens, s.seed, self.target.start, self.target.pad, rows=s.batch_size,
            fertilities=self.fertilities(model, data),
        )  # fmt: skip

    def fertilities(self, model: Model, data: SequenceDataset) -> Fertilities | None:
        """Return a function for the fertilities of a pair; None: the model does not learn them."""
        return None

    def dev(self, model: Model, lines: CorpusSplit) -> Dev:
        s, data = self.settings, self.prepare(model, lines, "dev.arrow", say_nothing, no_progress)
        batches = BucketedBatches(
            data, max(s.batch_tokens, DEV_TOKENS), s.seed, self.target.start, self.target.pad, shuffle=False,
            fertilities=self.fertilities(model, data),
        )  # fmt: skip
        asked = group_references(lines, self.job.any_reference, self.job.dev_most) if self.metrics else ((), ())
        return Dev(
            self.objective(), lambda: first_epoch(batches), self.make_predictor, self.loss_metrics, self.metrics, *asked
        )
