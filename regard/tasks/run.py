"""A run: a model that generates text, with its tokenizers.

run = regard.load("runs/x")
run.predict(["hello"])[0][0].text
for piece in run.stream("once upon a time"): print(piece, end="")
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.core import Model, UserError, select
from regard.data.batches import pad_rows
from regard.data.tokenizer import Tokenizer
from regard.decode import DecodeConfig, Hypothesis, Request, search, stream
from regard.decode.align import cross_attention
from regard.decode.config import DEFAULT_SAMPLING, sampling
from regard.decode.rules import compose, merge_ends, suppress
from regard.decode.sample import Seeds
from regard.decode.session import Session
from regard.decode.shortlist import FILE, Shortlist, ShortlistedModel
from regard.decode.workers import run_parallel
from regard.machine import forks, is_tuned
from regard.memory import check_fits_memory, machine_memory
from regard.metrics import BITS

READ_AHEAD = 4096  # texts that are read before they are sorted by length and batched
ROWS_PER_WORKER = 64  # rows, times beams, that are worth another worker
ALWAYS_FITS = 1024  # positions of an answer, times beams, that are too few to ask whether there is memory for them
MAX_ROWS = 640  # of a batch; more gains nothing
MAX_STATE_BYTES = 1 << 29  # of the decoding states of all batches
LOGIT_BYTES = 16  # bytes per token of the vocabulary while the logits of a row are computed
MAX_SOURCE_TOKENS = 10_000  # by default
MAX_NEW_TOKENS = 200  # after a prompt, by default
REPLACEMENT = "\ufffd"  # what decoding gives for bytes that are not (yet) a whole character

_SESSIONS: WeakKeyDictionary[Run, threading.local] = WeakKeyDictionary()  # of each run, one for every thread


class Alignment(NamedTuple):
    """The cross-attention weights at each output token, averaged over heads and layers."""

    weights: list[list[float]]  # (target, source), each row sums to 1
    source: list[str]  # tokens, and the end token
    target: list[str]  # tokens, and the end token if the answer ended with it


class Prediction(NamedTuple):
    """One answer to one input."""

    text: str  # after a prompt: only the continuation, to be appended directly
    score: float  # by which answers are ranked
    logprob: float
    tokens: list[str]
    ended: bool  # by the end token, not by the length limit
    cut: bool = False  # whether the input was too long and truncated
    alignment: Alignment | None = None


class EncodedInput(NamedTuple):
    """The token ids of an input, and whether it was truncated."""

    ids: list[int]  # a source has special tokens, a prompt has none
    cut: bool = False


class Run:
    """A trained encoder-decoder or language model with its tokenizers.

    documents: whether a language model was trained on separate texts, each with an end; False: on one running text.
    note:      a sentence for the user about the model; empty: nothing to say.
    converted: whether the model came from another library.
    takes:     the kind of its inputs.
    options:   the options of `regard predict` that it supports.
    """

    takes = "texts"
    options = (
        "beam", "length_penalty", "early_stopping", "num_return", "temperature", "top_k", "top_p", "min_p",
        "repetition_penalty", "seed", "max_new_tokens", "truncate", "speculate", "attention", "stream", "draft_model",
        "shortlist",
    )  # fmt: skip

    def __init__(
        self,
        model: Model,
        source: Tokenizer,
        target: Tokenizer,
        folder: Path | None = None,
        documents: bool = True,
        note: str = "",
        converted: bool = False,
    ):
        self.model, self.source, self.target, self.folder = model.eval(), source, target, folder
        self.documents, self.note, self.converted = documents, note, converted
        self.device = next(model.parameters()).device
        self._draft: Run | None = None

    @property
    def draft_model(self) -> Run | None:
        """Return the smaller run with the same tokenizer that drafts tokens for speculative decoding."""
        return self._draft

    @draft_model.setter
    def draft_model(self, run: Run | str | Path | None) -> None:
        if isinstance(run, str | Path):
            from .load import load

            run = load(run, str(self.device))  # type: ignore[assignment]
        if run is not None and not (isinstance(run, Run) and run.target.hash() == self.target.hash()):
            raise UserError("a draft must be a model over the very same tokens")
        if run is not None and (run.pairs or self.pairs):
            raise UserError("drafts are for language models: these turn a source into a target")
        self._draft = run

    @property
    def pairs(self) -> bool:
        """Return whether the model turns a source into a target, instead of continuing a text."""
        return self.model.kind == "encoder-decoder"

    @cached_property
    def config(self) -> DecodeConfig:
        """Return the decoding config of the recipe. By default, an encoder-decoder uses beam search; a language model
        samples, since greedy texts soon repeat themselves; a converted one is greedy, unless its generation_config.json
        differs."""
        usual = DecodeConfig(beam=4) if self.pairs else DecodeConfig() if self.converted else DEFAULT_SAMPLING
        return DecodeConfig.read(getattr(self.model, "recipe", {}).get("decode", {}), usual)

    @cached_property
    def _max_positions(self) -> int | None:
        """Return the most positions of the decoder; None: no limit."""
        return self.model.limit

    @cached_property
    def ends_texts(self) -> bool:
        """Return whether texts of a language model end in the end token; lines of a running text do only if the
        tokenizer drops line ends."""
        return self.documents or not self.target.keeps_newlines()

    def appends_end(self, documents: bool) -> bool:
        """Return whether the end token is appended to texts in an evaluation, as in training. documents: whether they
        are separate texts, which decides for a converted model."""
        return documents or not self.target.keeps_newlines() if self.converted else self.ends_texts

    @cached_property
    def decoder_prefix(self) -> list[int]:
        """Return the token ids that precede every answer: the start token, or before a prompt, what separated texts in
        training."""
        if self.pairs:
            return [self.target.start, *([] if self.target.forced_bos is None else [self.target.forced_bos])]
        if self.converted:  # as its own tokenizer does
            begun = self.target.inner.encode("", add_special_tokens=True).ids
            return [self.target.start] if begun[:1] == [self.target.start] else []
        return [self.target.end] if self.ends_texts else self.target.encode(["\n"])[0]

    @property
    def token_before_text(self) -> int:
        """Return the token before the first of a text: the last of the prefix, or the start token."""
        return (self.decoder_prefix or [self.target.start])[-1]

    @property
    def metrics(self) -> list[str]:
        """Return the metrics that it is evaluated by."""
        return ["loss", "perplexity", *(("bleu", "chrf", "exact", "token_error") if self.pairs else BITS)]

    def predict(
        self, texts: Iterable[str], config: DecodeConfig | None = None, attention: bool = False
    ) -> list[list[Prediction]]:
        """Return for every text its answers, best first, in the order of the texts."""
        return list(self.answers(texts, config, attention, read_ahead=sys.maxsize))

    def answers(
        self,
        texts: Iterable[str],
        config: DecodeConfig | None = None,
        attention: bool = False,
        read_ahead: int = READ_AHEAD,
        tick: Callable[[int], None] = lambda done: None,
    ) -> Iterator[list[Prediction]]:
        """Yield the answers of `predict` one text at a time, reading `read_ahead` texts ahead, which are batched by
        length. `tick` is called with the number of texts of each finished batch."""
        config = self.config if config is None else config
        if isinstance(texts, str):
            raise UserError("texts come in a list: for a single one, say [text]")
        if attention and not self.pairs:
            raise UserError("a language model has no source, so there is no alignment with it")
        source, lines_before = iter(texts), 0
        while some := list(islice(source, read_ahead)):
            coded = self.encode_inputs(some, config, lines_before)
            found: list[list[Prediction]] = [[]] * len(some)

            def work(rows: list[int], coded: list[EncodedInput] = coded) -> list[list[Prediction]]:
                return self._answer([coded[row] for row in rows], config, attention)

            # Attention weights are recorded through taps, in this process.
            workers = 1 if attention else self._workers(len(some) * config.beam)
            for rows, batch_answers in run_parallel(
                self._batches(coded, config, workers), work, workers, forks(self.device)
            ):
                for row, answers in zip(rows, batch_answers, strict=True):
                    found[row] = answers
                tick(len(rows))
            yield from found
            lines_before += len(some)

    def stream(self, text: str, config: DecodeConfig | None = None) -> Iterator[str]:
        """Yield the answer to one text piece by piece; together they are what `predict` returns. Beam search,
        speculation and shortlists yield the whole answer at the end."""
        config = self.config if config is None else config
        if config.beam > 1 or config.speculate or config.shortlist:
            if whole := self.predict([text], config)[0][0].text:
                yield whole
            return
        coded = self.encode_inputs([text], config)
        ids: list[int] = []
        sent = ""
        for new in stream(self.model, self.request(coded, config), *sampling(config), self._seeds(coded, config)):
            if int(new.tokens) == self.target.end:
                break
            ids.append(int(new.tokens))
            said = self._text(coded[0], ids).rstrip(REPLACEMENT)  # the next bytes may complete a character
            if len(said) > len(sent) and said.startswith(sent):
                yield said[len(sent) :]
                sent = said
        if rest := self._text(coded[0], ids)[len(sent) :]:
            yield rest

    def embed(self, texts: Sequence[str], pool: str | None = None, normalize: bool | None = None) -> Tensor:
        """Return the vectors of texts, (texts, width), from the encoder; see tasks/embed.py."""
        from .embed import Embedder

        return Embedder.of(self).embed(texts, pool, normalize)

    def encode_inputs(self, texts: list[str], config: DecodeConfig, lines_before: int = 0) -> list[EncodedInput]:
        """Return the token ids of texts, truncated to what the model takes. lines_before: the number of earlier inputs,
        for line numbers in messages."""
        known = self.model.source_limit if self.pairs else self._max_positions
        rows = self.source.encode_with_special_tokens(texts) if self.pairs else self.source.encode(texts)
        marks = len(self.source.encode_with_special_tokens([""])[0]) if self.pairs else 0
        limit = (config.max_source_tokens or MAX_SOURCE_TOKENS) + marks
        if known is not None:
            limit = min(limit, known - (0 if self.pairs else len(self.decoder_prefix)))
        coded = []
        for number, ids in enumerate(rows, lines_before + 1):
            if len(ids) <= limit:
                coded.append(EncodedInput(ids))
            elif not config.truncate:
                raise UserError(
                    f"line {number} has {len(ids) - marks:,} tokens, and at most {limit - marks:,} can be taken: "
                    "shorten it, or let it be cut (--truncate, or decode.truncate in its recipe)"
                )
            elif self.pairs:
                coded.append(EncodedInput([*ids[: limit - 1], ids[-1]], cut=True))  # the end token stays
            else:
                # leaves positions for the continuation
                keep = max(limit - (config.max_new_tokens or MAX_NEW_TOKENS), limit // 2)
                coded.append(EncodedInput(ids[len(ids) - keep :], cut=True))
        return coded

    def request(self, coded: list[EncodedInput], config: DecodeConfig) -> Request:
        """Return a batch of inputs as a decoding request."""
        if self.pairs:
            tokens, valid = self._padded([one.ids for one in coded], self.source.pad)
            with torch.no_grad():
                memory = self._session().encode(tokens, valid)
            prefix, prefix_valid = torch.tensor([self.decoder_prefix] * len(coded), device=self.device), None
        else:
            rows = [[*self.decoder_prefix, *one.ids] or [self.token_before_text] for one in coded]
            prefix, prefix_valid = self._padded(rows, self.target.pad)
            memory = None
        most = torch.tensor([self._max_new_tokens(one, config) for one in coded], device=self.device)
        rules = [merge_ends(self.target.end, self.target.extra_ends)] if self.target.extra_ends else []
        rule = compose([*rules, *([suppress(self.target.suppressed)] if self.target.suppressed else [])])
        forced = len(self.decoder_prefix) - 1 if self.pairs else 0  # tokens that every answer is forced to begin with
        return Request(prefix, self.target.end, most, prefix_valid, memory, rule, forced)

    def _max_new_tokens(self, one: EncodedInput, config: DecodeConfig) -> int:
        """Return the most new tokens, limited by the positions; the last token is never read."""
        before = max(len(self.decoder_prefix) + (0 if self.pairs else len(one.ids)), 1)
        wanted = config.max_new_tokens or (2 * len(one.ids) + 20 if self.pairs else MAX_NEW_TOKENS)
        return wanted if self._max_positions is None else min(wanted, self._max_positions - before + 1)

    def _padded(self, rows: list[list[int]], pad: int) -> tuple[Tensor, Tensor | None]:
        tokens, valid = pad_rows(rows, pad)
        return tokens.to(self.device), None if bool(valid.all()) else valid.to(self.device)

    def _workers(self, rows: int) -> int:
        """Return the number of worker processes: 1 in a host's process, where none may be started."""
        most = torch.get_num_threads() if self.device.type == "cpu" and is_tuned() else 1
        return max(min(most, rows // ROWS_PER_WORKER), 1)

    def _batches(self, coded: list[EncodedInput], config: DecodeConfig, workers: int) -> list[list[int]]:
        """Return the indices of the inputs of each batch: similar lengths, as many as fit in memory, the longest
        first."""
        candidates = config.beam * config.length_beam
        if len(coded) == 1 and candidates * self._max_positions_of(coded[0], config) <= ALWAYS_FITS:
            return [[0]]
        order = sorted(range(len(coded)), key=lambda i: -len(coded[i].ids))
        batches = self._split(coded, order, config, workers, len(coded))
        if len(batches) % workers:  # so that no worker is idle at the end
            turns = -(-len(batches) // workers)
            batches = self._split(coded, order, config, workers, -(-len(coded) // (turns * workers)))
        return batches

    def _split(
        self, coded: list[EncodedInput], order: list[int], config: DecodeConfig, workers: int, most: int
    ) -> list[list[int]]:
        """Split inputs, in this order, into batches of at most `most`."""
        batches: list[list[int]] = []
        room = 0  # inputs that still fit in the last batch
        for i in order:
            if not room:
                batches.append([])
                room = min(self._max_rows(self._max_positions_of(coded[i], config), config, workers), most)
            batches[-1].append(i)
            room -= 1
        return batches

    def _max_positions_of(self, one: EncodedInput, config: DecodeConfig) -> int:
        """Return the most positions of an input and its answer together."""
        return len(one.ids) + self._max_new_tokens(one, config)

    def _max_rows(self, positions: int, config: DecodeConfig, workers: int) -> int:
        """Return the most inputs of this length in a batch; refuse an input that does not fit in memory alone."""
        state = self.model.cost(1, positions - 1).state
        alone = config.beam * (state + LOGIT_BYTES * self.model.vocab)
        if self.device.type == "cpu":
            check_fits_memory(f"an answer of {positions:,} positions with a beam of {config.beam:,}", alone)
        if config.max_batch_tokens:
            return max(
                min(config.max_batch_tokens // (config.beam * positions), machine_memory() // (2 * workers * alone)), 1
            )
        return max(min(MAX_ROWS, MAX_STATE_BYTES // (workers * max(state, 1))) // config.beam, 1)

    def _answer(self, coded: list[EncodedInput], config: DecodeConfig, attention: bool) -> list[list[Prediction]]:
        request = self.request(coded, config)
        guesses = None if self.draft_model is None else self.draft_model.model
        if config.shortlist:
            found = self._search_shortlist(coded, request, config)
        else:
            found = self._search(request, config, self._seeds(coded, config), guesses)
        alignments = iter(self._alignments(coded, request, found) if attention else ())
        return [
            [self._prediction(one, answer, next(alignments, None)) for answer in answers]
            for one, answers in zip(coded, found, strict=True)
        ]

    def _search(
        self, request: Request, config: DecodeConfig, seeds: Seeds | None, draft: Model | None
    ) -> list[list[Hypothesis]]:
        """Search with the session of this thread, so that the fused step is compiled once and not for every call."""
        own = self._session()
        try:
            return search(own, request, config, seeds, draft)
        finally:
            if isinstance(own, Session):
                own.forget_buffers()

    def _session(self) -> Session | Any:
        """Return the session of this thread; or the model, where it is not a plain one."""
        if not isinstance(self.model, Model):
            return self.model
        threads = _SESSIONS.setdefault(self, threading.local())
        own: Session | None = getattr(threads, "session", None)
        if own is None or own.model is not self.model:
            own = threads.session = Session(self.model)
        return own

    def _search_shortlist(
        self, coded: list[EncodedInput], request: Request, config: DecodeConfig
    ) -> list[list[Hypothesis]]:
        """Search among the shortlisted tokens of the sources only."""
        ids = torch.tensor([token for one in coded for token in one.ids], device=self.device)
        always = torch.tensor([*self.decoder_prefix, self.target.end], device=self.device)
        few = ShortlistedModel(self.model, torch.cat((self.shortlist.tokens_for(ids), always)).unique())
        return few.to_vocab_ids(search(few, few.to_shortlist_ids(request), config, self._seeds(coded, config)))

    @cached_property
    def shortlist(self) -> Shortlist:
        """Return the shortlist of the run folder."""
        if not self.pairs or self.folder is None:
            raise UserError("a shortlist is for a run that turns a source into a target")
        return Shortlist.load(self.folder / FILE, (self.model.source_vocab, self.model.vocab))

    def _prediction(self, one: EncodedInput, answer: Hypothesis, alignment: Alignment | None) -> Prediction:
        tokens = self.target.tokens(answer.tokens)
        text = self._text(one, answer.tokens)
        return Prediction(text, answer.score, answer.logprob, tokens, answer.ended, one.cut, alignment)

    def _text(self, one: EncodedInput, ids: list[int]) -> str:
        """Return an answer as text. After a prompt it may begin with a space that it would not have alone."""
        if self.pairs:
            return self.target.decode(ids)
        before, whole = self.target.decode(one.ids), self.target.decode([*one.ids, *ids])
        return whole[len(before) :] if whole.startswith(before) else self.target.decode(ids)

    def _seeds(self, coded: list[EncodedInput], config: DecodeConfig) -> list[list[int]] | None:
        """Return one seed per input, so that its answer does not depend on the rest of the batch."""
        return None if config.seed is None else [[config.seed, *one.ids] for one in coded]

    def _alignments(
        self, coded: list[EncodedInput], request: Request, found: list[list[Hypothesis]]
    ) -> Iterator[Alignment]:
        """Yield the alignments of all answers, in order."""
        asked = [row for row, answers in enumerate(found) for _ in answers]
        given = [answer for answers in found for answer in answers]
        tokens, valid = self._padded([[*self.decoder_prefix, *answer.tokens] for answer in given], self.target.pad)
        memory = select(request.memory, torch.tensor(asked, device=self.device))
        attention = cross_attention(self.model, tokens, valid, memory).cpu()
        for row, answer, weights in zip(asked, given, attention, strict=True):
            source = self.source.tokens(coded[row].ids)
            target = self.target.tokens([*answer.tokens, *([self.target.end] if answer.ended else [])])
            begun = len(self.decoder_prefix) - 1
            yield Alignment(weights[begun : begun + len(target), : len(source)].tolist(), source, target)
