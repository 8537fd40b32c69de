"""A run: the model, its tokenizers, and what can be asked of them.

run = regard.load("runs/x")
run.predict(["hello"])[0][0].text
for piece in run.stream("once upon a time"): print(piece, end="")
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from regard.core import Model, UserError, select
from regard.data.batches import pad_rows
from regard.data.tokenizer import Tokenizer
from regard.decode import DecodeConfig, Hypothesis, Request, search, stream
from regard.decode.align import cross_attention
from regard.decode.config import DEFAULT_SAMPLING, sampling
from regard.decode.rules import compose, merge_ends, suppress
from regard.decode.shortlist import FILE, Shortlist, ShortlistedModel
from regard.decode.workers import run_parallel
from regard.machine import forks, is_tuned
from regard.memory import check_fits_memory, machine_memory
from regard.metrics import BITS

AHEAD = 4096  # texts that are sorted by length together
ALONE = 64  # rows, beams counted, that are enough for a thread of their own
SIDE_BY_SIDE = 640  # rows of a batch; more gains nothing
STATE = 1 << 29  # bytes that the states of all batches may take
SCORES = 16  # bytes for every token of the vocabulary while a row is scored
LONGEST = 10_000  # tokens of an input, where nothing else is said
MOST = 200  # new tokens after a prompt, where nothing else is said
HALF = "\ufffd"  # what a decoder writes for bytes that are no whole character (yet)


class Alignment(NamedTuple):
    """Where the decoder looked while it said each token: the mean over heads and layers of what crosses over."""

    weights: list[list[float]]  # (target, source), each row sums to 1
    source: list[str]  # tokens, and the end mark
    target: list[str]  # tokens, and the end mark where the answer ended by it


class Prediction(NamedTuple):
    """One answer to one input."""

    text: str  # after a prompt: what comes next, to be put right behind it
    score: float  # what answers are ranked by
    logprob: float
    tokens: list[str]
    ended: bool  # by the end mark, not for lack of room
    cut: bool = False  # the input was too long, and shortened
    alignment: Alignment | None = None


class Coded(NamedTuple):
    """An input in tokens."""

    ids: list[int]  # of a source, with its marks
    cut: bool = False


class Run:
    """A trained model with everything around it.

    documents: a language model's texts were separate ones in training, each with an end; False: one running text.
    note:      what a person should know about the model, in a sentence; empty when there is nothing.
    takes:     what it is given to answer: texts.
    options:   of `regard predict` that mean something to it.
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
        foreign: bool = False,
    ):
        self.model, self.source, self.target, self.folder = model.eval(), source, target, folder
        self.documents, self.note, self.foreign = documents, note, foreign
        self.device = next(model.parameters()).device
        self._draft: Run | None = None

    @property
    def draft_model(self) -> Run | None:
        """A smaller run over the same tokens that drafts tokens where `DecodeConfig.speculate` asks for it."""
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
        """Whether it turns a source into a target, instead of going on with a text."""
        return self.model.kind == "encoder-decoder"

    @cached_property
    def config(self) -> DecodeConfig:
        """How its recipe says to decode. Where that is silent: beam search for pairs; a language model samples, since
        greedy texts soon repeat themselves; one from elsewhere is greedy, as its generation_config.json says."""
        usual = DecodeConfig(beam=4) if self.pairs else DecodeConfig() if self.foreign else DEFAULT_SAMPLING
        return DecodeConfig.read(getattr(self.model, "recipe", {}).get("decode", {}), usual)

    @cached_property
    def _reach(self) -> int | None:
        """Positions of the decoder."""
        return self.model.limit

    @cached_property
    def marked(self) -> bool:
        """Whether a language model's texts end in an end mark: those of a running text only if lines do not show."""
        return self.documents or not self.target.keeps_lines()

    def ends(self, documents: bool) -> bool:
        """Whether texts to be measured on end in an end mark: as in training. documents: they are separate ones, which
        counts for a model from elsewhere."""
        return documents or not self.target.keeps_lines() if self.foreign else self.marked

    @cached_property
    def opening(self) -> list[int]:
        """What every answer begins after: the start mark; before a prompt, whatever stood between texts in training."""
        if self.pairs:
            return [self.target.start, *([] if self.target.forced is None else [self.target.forced])]
        if self.foreign:  # as its own tokenizer begins
            begun = self.target.inner.encode("", add_special_tokens=True).ids
            return [self.target.start] if begun[:1] == [self.target.start] else []
        return [self.target.end] if self.marked else self.target.encode(["\n"])[0]

    @property
    def before(self) -> int:
        """The token right before the first of a text: where nothing opens it, the start mark."""
        return (self.opening or [self.target.start])[-1]

    @property
    def metrics(self) -> list[str]:
        """What tells how good it is."""
        return ["loss", "perplexity", *(("bleu", "chrf", "exact", "token_error") if self.pairs else BITS)]

    def predict(
        self, texts: Iterable[str], config: DecodeConfig | None = None, attention: bool = False
    ) -> list[list[Prediction]]:
        """For every text its answers, best first, in the order of the texts."""
        return list(self.answers(texts, config, attention, ahead=sys.maxsize))

    def answers(
        self,
        texts: Iterable[str],
        config: DecodeConfig | None = None,
        attention: bool = False,
        ahead: int = AHEAD,
        tick: Callable[[int], None] = lambda done: None,
    ) -> Iterator[list[Prediction]]:
        """The same one by one, reading so many texts ahead: those of about equal length are worked on together.
        `tick` is called with the number of texts that a batch has done."""
        config = self.config if config is None else config
        if isinstance(texts, str):
            raise UserError("texts come in a list: for a single one, say [text]")
        if attention and not self.pairs:
            raise UserError("a language model has no source, so there is no alignment with it")
        source, begun = iter(texts), 0
        while some := list(islice(source, ahead)):
            coded = self.code(some, config, begun)
            found: list[list[Prediction]] = [[]] * len(some)

            def work(rows: list[int], coded: list[Coded] = coded) -> list[list[Prediction]]:
                return self._answer([coded[row] for row in rows], config, attention)

            workers = (
                1 if attention else self._workers(len(some) * config.beam)
            )  # to see where it looks, one watches it
            for rows, told in run_parallel(self._batches(coded, config, workers), work, workers, forks(self.device)):
                for row, answers in zip(rows, told, strict=True):
                    found[row] = answers
                tick(len(rows))
            yield from found
            begun += len(some)

    def stream(self, text: str, config: DecodeConfig | None = None) -> Iterator[str]:
        """The answer to one text, piece by piece as it comes; together they are what `predict` gives. Beam search knows
        its answer only at the end, and so do guesses and shortlists."""
        config = self.config if config is None else config
        if config.beam > 1 or config.speculate or config.shortlist:
            if whole := self.predict([text], config)[0][0].text:
                yield whole
            return
        coded = self.code([text], config)
        ids: list[int] = []
        told = ""
        for new in stream(self.model, self.request(coded, config), *sampling(config), self._seeds(coded, config)):
            if int(new.tokens) == self.target.end:
                break
            ids.append(int(new.tokens))
            said = self._text(coded[0], ids).rstrip(HALF)  # the next bytes may complete a character
            if len(said) > len(told) and said.startswith(told):
                yield said[len(told) :]
                told = said
        if rest := self._text(coded[0], ids)[len(told) :]:
            yield rest

    def embed(self, texts: Sequence[str], pool: str | None = None, unit: bool | None = None) -> Tensor:
        """(texts, width) a vector for each, of an encoder: see tasks/embed.py."""
        from .embed import Embedder

        return Embedder.of(self).embed(texts, pool, unit)

    def code(self, texts: list[str], config: DecodeConfig, begun: int = 0) -> list[Coded]:
        """Texts as tokens, none longer than the model takes. `begun`: how many lines came before these."""
        known = self.model.source_limit if self.pairs else self._reach
        rows = self.source.frame(texts) if self.pairs else self.source.encode(texts)
        marks = len(self.source.frame([""])[0]) if self.pairs else 0
        limit = (config.max_source_tokens or LONGEST) + marks
        if known is not None:
            limit = min(limit, known - (0 if self.pairs else len(self.opening)))
        coded = []
        for number, ids in enumerate(rows, begun + 1):
            if len(ids) <= limit:
                coded.append(Coded(ids))
            elif not config.truncate:
                raise UserError(
                    f"line {number} has {len(ids) - marks:,} tokens, and at most {limit - marks:,} can be taken: "
                    "shorten it, or let it be cut (--truncate, or decode.truncate in its recipe)"
                )
            elif self.pairs:
                coded.append(Coded([*ids[: limit - 1], ids[-1]], cut=True))  # the end mark stays
            else:
                keep = max(limit - (config.max_new_tokens or MOST), limit // 2)  # room to go on
                coded.append(Coded(ids[len(ids) - keep :], cut=True))
        return coded

    def request(self, coded: list[Coded], config: DecodeConfig) -> Request:
        """A batch of inputs as a decoder wants it."""
        if self.pairs:
            tokens, valid = self._padded([one.ids for one in coded], self.source.pad)
            with torch.no_grad():
                memory = self.model.encode(tokens, valid)
            prefix, prefix_valid = torch.tensor([self.opening] * len(coded), device=self.device), None
        else:
            rows = [[*self.opening, *one.ids] or [self.before] for one in coded]
            prefix, prefix_valid = self._padded(rows, self.target.pad)
            memory = None
        most = torch.tensor([self._most(one, config) for one in coded], device=self.device)
        rules = [merge_ends(self.target.end, self.target.ends)] if self.target.ends else []
        rule = compose([*rules, *([suppress(self.target.never)] if self.target.never else [])])
        ahead = len(self.opening) - 1 if self.pairs else 0  # what an answer is made to begin with
        return Request(prefix, self.target.end, most, prefix_valid, memory, rule, ahead)

    def _most(self, one: Coded, config: DecodeConfig) -> int:
        """New tokens, no further than the positions reach; the last one is never read."""
        before = max(len(self.opening) + (0 if self.pairs else len(one.ids)), 1)
        wanted = config.max_new_tokens or (2 * len(one.ids) + 20 if self.pairs else MOST)
        return wanted if self._reach is None else min(wanted, self._reach - before + 1)

    def _padded(self, rows: list[list[int]], pad: int) -> tuple[Tensor, Tensor | None]:
        tokens, valid = pad_rows(rows, pad)
        return tokens.to(self.device), None if bool(valid.all()) else valid.to(self.device)

    def _workers(self, rows: int) -> int:
        """Return how many batches are worked on at once: one in a host's process, where no worker may be started."""
        most = torch.get_num_threads() if self.device.type == "cpu" and is_tuned() else 1
        return max(min(most, rows // ALONE), 1)

    def _batches(self, coded: list[Coded], config: DecodeConfig, workers: int) -> list[list[int]]:
        """Which inputs go together: of about equal length, as many as there is room for, the longest first."""
        order = sorted(range(len(coded)), key=lambda i: -len(coded[i].ids))
        batches = self._cut(coded, order, config, workers, len(coded))
        if len(batches) % workers:  # so that nobody is idle at the end
            turns = -(-len(batches) // workers)
            batches = self._cut(coded, order, config, workers, -(-len(coded) // (turns * workers)))
        return batches

    def _cut(
        self, coded: list[Coded], order: list[int], config: DecodeConfig, workers: int, most: int
    ) -> list[list[int]]:
        """In this order, no more than `most` together."""
        batches: list[list[int]] = []
        room = 0  # of the last batch, in inputs
        for i in order:
            if not room:
                batches.append([])
                room = min(self._room(len(coded[i].ids) + self._most(coded[i], config), config, workers), most)
            batches[-1].append(i)
            room -= 1
        return batches

    def _room(self, positions: int, config: DecodeConfig, workers: int) -> int:
        """Inputs of such a length that go together. One that no memory could hold is refused."""
        state = self.model.cost(1, positions - 1).state
        alone = config.beam * (state + SCORES * self.model.vocab)
        if self.device.type == "cpu":
            check_fits_memory(f"an answer of {positions:,} positions with a beam of {config.beam:,}", alone)
        if config.max_batch_tokens:
            return max(
                min(config.max_batch_tokens // (config.beam * positions), machine_memory() // (2 * workers * alone)), 1
            )
        return max(min(SIDE_BY_SIDE, STATE // (workers * max(state, 1))) // config.beam, 1)

    def _answer(self, coded: list[Coded], config: DecodeConfig, attention: bool) -> list[list[Prediction]]:
        request = self.request(coded, config)
        guesses = None if self.draft_model is None else self.draft_model.model
        if config.shortlist:
            found = self._search_few(coded, request, config)
        else:
            found = search(self.model, request, config, self._seeds(coded, config), guesses)
        looked = iter(self._alignments(coded, request, found) if attention else ())
        return [
            [self._prediction(one, answer, next(looked, None)) for answer in answers]
            for one, answers in zip(coded, found, strict=True)
        ]

    def _search_few(self, coded: list[Coded], request: Request, config: DecodeConfig) -> list[list[Hypothesis]]:
        """Among the tokens that go with those of the sources."""
        ids = torch.tensor([token for one in coded for token in one.ids], device=self.device)
        always = torch.tensor([*self.opening, self.target.end], device=self.device)
        few = ShortlistedModel(self.model, torch.cat((self.shortlist.tokens_for(ids), always)).unique())
        return few.to_vocab_ids(search(few, few.to_shortlist_ids(request), config, self._seeds(coded, config)))

    @cached_property
    def shortlist(self) -> Shortlist:
        """Of the run folder."""
        if not self.pairs or self.folder is None:
            raise UserError("a shortlist is for a run that turns a source into a target")
        return Shortlist.load(self.folder / FILE, (self.model.source_vocab, self.model.vocab))

    def _prediction(self, one: Coded, answer: Hypothesis, alignment: Alignment | None) -> Prediction:
        tokens = self.target.tokens(answer.tokens)
        text = self._text(one, answer.tokens)
        return Prediction(text, answer.score, answer.logprob, tokens, answer.ended, one.cut, alignment)

    def _text(self, one: Coded, ids: list[int]) -> str:
        """An answer in words. After a prompt it may begin with a space that it would not have alone."""
        if self.pairs:
            return self.target.decode(ids)
        before, whole = self.target.decode(one.ids), self.target.decode([*one.ids, *ids])
        return whole[len(before) :] if whole.startswith(before) else self.target.decode(ids)

    def _seeds(self, coded: list[Coded], config: DecodeConfig) -> list[list[int]] | None:
        """So that a text's answer does not depend on the texts beside it."""
        return None if config.seed is None else [[config.seed, *one.ids] for one in coded]

    def _alignments(self, coded: list[Coded], request: Request, found: list[list[Hypothesis]]) -> Iterator[Alignment]:
        """Of all answers, in their order."""
        asked = [row for row, answers in enumerate(found) for _ in answers]
        given = [answer for answers in found for answer in answers]
        tokens, valid = self._padded([[*self.opening, *answer.tokens] for answer in given], self.target.pad)
        memory = select(request.memory, torch.tensor(asked, device=self.device))
        looked = cross_attention(self.model, tokens, valid, memory).cpu()
        for row, answer, weights in zip(asked, given, looked, strict=True):
            source = self.source.tokens(coded[row].ids)
            target = self.target.tokens([*answer.tokens, *([self.target.end] if answer.ended else [])])
            begun = len(self.opening) - 1
            yield Alignment(weights[begun : begun + len(target), : len(source)].tolist(), source, target)
