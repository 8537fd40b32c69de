"""Continue a text with a decoder that has a memory of earlier segments: it learns from streams that continue from batch
to batch."""

from __future__ import annotations

from functools import partial

from regard.core import Model
from regard.data import Corpus, CorpusSplit, prepare_text
from regard.data.streams import StreamBatches, eval_streams
from regard.parts.objectives.objective import Objective
from regard.parts.objectives.segments import Segments, required_capacity

from .dev import Dev
from .run import Run
from .task import DEV_TOKENS, Say, Tick
from .text import Text


class SegmentedText(Text):
    objective_name = "segments"

    def check_model(self, model: Model) -> None:
        required_capacity(model)

    def objective(self) -> Objective:
        return Segments(self.settings.label_smoothing)

    def batches(self, model: Model, corpus: Corpus, say: Say, tick: Tick) -> StreamBatches:
        s = self.settings
        text = prepare_text(corpus.train, self.target, self.data_path("train.ids"), partial(tick, "preparing"))
        return StreamBatches(text, s.context_length, s.batch_size or max(s.batch_tokens // s.context_length, 1), s.seed)

    def dev(self, model: Model, lines: CorpusSplit) -> Dev:
        context, pad = self.settings.context_length, self.target.pad
        text = prepare_text(lines, self.target, self.data_path("dev.ids"))
        before = Run(model, self.source, self.target, documents=lines.documents).decoder_prefix[-1]
        rows = max(DEV_TOKENS // context, 1)
        return Dev(self.objective(), lambda: eval_streams(text, before, context, rows, pad), self.make_predictor)
