"""Continue a text: a decoder learns to predict every next token, from running text or from separate texts."""

from __future__ import annotations

from functools import partial

from regard.core import Model, UserError
from regard.data import Batches, Corpus, CorpusSplit, WindowBatches, prepare_text

from .dev import Dev, windows
from .run import Run
from .task import DEV_TOKENS, Say, Task, Tick


class Text(Task):
    objective_name = "next_token"
    kind = "decoder"
    reads = "text"
    file_suffix = "ids"
    default_tokenizer = "characters"

    def check_model(self, model: Model) -> None:
        context = self.settings.context_length
        if model.limit is not None and context > model.limit:
            raise UserError(
                f"train.context_length is {context}, and the positions of this model reach only {model.limit}"
            )

    def batches(self, model: Model, corpus: Corpus, say: Say, tick: Tick) -> Batches:
        s = self.settings
        stream = prepare_text(corpus.train, self.target, self.data_path("train.ids"), partial(tick, "preparing"))
        return WindowBatches(
            stream, s.context_length, s.batch_size or max(s.batch_tokens // s.context_length, 1), s.seed
        )

    def dev(self, model: Model, lines: CorpusSplit) -> Dev:
        context, pad = self.settings.context_length, self.target.pad
        text = prepare_text(lines, self.target, self.data_path("dev.ids"))
        before = Run(model, self.source, self.target, documents=lines.documents).decoder_prefix[-1]
        rows = max(DEV_TOKENS // context, 1)
        return Dev(self.objective(), lambda: windows(text, before, context, rows, pad), self.make_predictor)
