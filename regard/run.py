"""A run folder, loaded: the model, its tokenizers, and what can be asked of them.

run = regard.load("runs/x")
run.predict(["hello"])[0][0].text
for piece in run.stream("once upon a time"): print(piece, end="")
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard.core import Model, UserError, build, restore, select
from regard.core.errors import in_one_line, short
from regard.data.batches import pad_rows
from regard.data.tokenizer import Tokenizer
from regard.decode import Hypothesis, Request, Way, search, stream
from regard.decode.align import looks
from regard.decode.rules import as_one, never, together
from regard.decode.way import knobs
from regard.kernels.int8 import quantise
from regard.train import checkpoint

if TYPE_CHECKING:
    from regard.use.nodes import NodeLabeller
    from regard.use.reader import Reader

__all__ = ["Alignment", "Prediction", "Run", "Way", "about", "load", "tokenizers"]

AHEAD = 4096  # texts that are sorted by length together
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
    options = ("beam", "penalty", "best", "temperature", "top_k", "top_p", "min_p", "repetition", "seed", "most", "cut",
               "guess", "align", "stream", "draft")  # fmt: skip

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
    def draft(self) -> Run | None:
        """A smaller run over the same tokens that guesses what this one will say, where `Way.guess` asks for it."""
        return self._draft

    @draft.setter
    def draft(self, run: Run | str | Path | None) -> None:
        run = load(run, str(self.device)) if isinstance(run, str | Path) else run
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
    def way(self) -> Way:
        """How its recipe says to decode. Where that is silent: beam search for pairs, greedy for texts."""
        usual = Way(beam=4) if self.pairs else Way()
        return Way.read(getattr(self.model, "recipe", {}).get("decode", {}), usual)

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
        return ["loss", "perplexity", *(["bleu", "chrf", "exact", "token_error"] if self.pairs else [])]

    def predict(self, texts: Iterable[str], way: Way | None = None, align: bool = False) -> list[list[Prediction]]:
        """For every text its answers, best first, in the order of the texts."""
        return list(self.answers(texts, way, align, ahead=sys.maxsize))

    def answers(
        self,
        texts: Iterable[str],
        way: Way | None = None,
        align: bool = False,
        ahead: int = AHEAD,
        tick: Callable[[int], None] = lambda done: None,
    ) -> Iterator[list[Prediction]]:
        """The same one by one, reading so many texts ahead: those of about equal length are worked on together.
        `tick` is called with the number of texts that a batch has done."""
        way = self.way if way is None else way
        if isinstance(texts, str):
            raise UserError("texts come in a list: for a single one, say [text]")
        if align and not self.pairs:
            raise UserError("a language model has no source, so there is no alignment with it")
        source, begun = iter(texts), 0
        while some := list(islice(source, ahead)):
            coded = self.code(some, way, begun)
            found: list[list[Prediction]] = [[]] * len(some)
            for rows in self._batches(coded, way):
                for row, answers in zip(rows, self._answer([coded[row] for row in rows], way, align), strict=True):
                    found[row] = answers
                tick(len(rows))
            yield from found
            begun += len(some)

    def stream(self, text: str, way: Way | None = None) -> Iterator[str]:
        """The answer to one text, piece by piece as it comes; together they are what `predict` gives. Beam search knows
        its answer only at the end."""
        way = self.way if way is None else way
        if way.beam > 1:
            if whole := self.predict([text], way)[0][0].text:
                yield whole
            return
        coded = self.code([text], way)
        ids: list[int] = []
        told = ""
        for new in stream(self.model, self.request(coded, way), *knobs(way), self._seeds(coded, way)):
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
        """(texts, width) a vector for each, of an encoder: see regard.use.embed."""
        from regard.use.embed import Embedder

        return Embedder.of(self).embed(texts, pool, unit)

    def code(self, texts: list[str], way: Way, begun: int = 0) -> list[Coded]:
        """Texts as tokens, none longer than the model takes. `begun`: how many lines came before these."""
        known = self.model.source_limit if self.pairs else self._reach
        rows = self.source.frame(texts) if self.pairs else self.source.encode(texts)
        marks = len(self.source.frame([""])[0]) if self.pairs else 0
        limit = (way.longest or LONGEST) + marks
        if known is not None:
            limit = min(limit, known - (0 if self.pairs else len(self.opening)))
        coded = []
        for number, ids in enumerate(rows, begun + 1):
            if len(ids) <= limit:
                coded.append(Coded(ids))
            elif not way.cut:
                raise UserError(
                    f"line {number} has {len(ids) - marks:,} tokens, and at most {limit - marks:,} can be taken: "
                    "shorten it, or let it be cut (--cut, or decode.cut in its recipe)"
                )
            elif self.pairs:
                coded.append(Coded([*ids[: limit - 1], ids[-1]], cut=True))  # the end mark stays
            else:
                keep = max(limit - (way.most or MOST), limit // 2)  # room to go on
                coded.append(Coded(ids[len(ids) - keep :], cut=True))
        return coded

    def request(self, coded: list[Coded], way: Way) -> Request:
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
        most = torch.tensor([self._most(one, way) for one in coded], device=self.device)
        rules = [as_one(self.target.end, self.target.ends)] if self.target.ends else []
        rule = together([*rules, *([never(self.target.never)] if self.target.never else [])])
        ahead = len(self.opening) - 1 if self.pairs else 0  # what an answer is made to begin with
        return Request(prefix, self.target.end, most, prefix_valid, memory, rule, ahead)

    def _most(self, one: Coded, way: Way) -> int:
        """New tokens, no further than the positions reach; the last one is never read."""
        before = max(len(self.opening) + (0 if self.pairs else len(one.ids)), 1)
        wanted = way.most or (2 * len(one.ids) + 20 if self.pairs else MOST)
        return wanted if self._reach is None else min(wanted, self._reach - before + 1)

    def _padded(self, rows: list[list[int]], pad: int) -> tuple[Tensor, Tensor | None]:
        tokens, valid = pad_rows(rows, pad)  # type: ignore[arg-type]
        return tokens.to(self.device), None if bool(valid.all()) else valid.to(self.device)

    def _batches(self, coded: list[Coded], way: Way) -> Iterator[list[int]]:
        """Which inputs go together: of about equal length, and no more positions than `way.tokens`."""
        rows: list[int] = []
        for i in sorted(range(len(coded)), key=lambda i: len(coded[i].ids)):
            positions = way.beam * (len(coded[i].ids) + self._most(coded[i], way))
            if rows and (len(rows) + 1) * positions > way.tokens:
                yield rows
                rows = []
            rows.append(i)
        if rows:
            yield rows

    def _answer(self, coded: list[Coded], way: Way, align: bool) -> list[list[Prediction]]:
        request = self.request(coded, way)
        guesses = None if self.draft is None else self.draft.model
        found = search(self.model, request, way, self._seeds(coded, way), guesses)
        looked = iter(self._alignments(coded, request, found) if align else ())
        return [
            [self._prediction(one, answer, next(looked, None)) for answer in answers]
            for one, answers in zip(coded, found, strict=True)
        ]

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

    def _seeds(self, coded: list[Coded], way: Way) -> list[list[int]] | None:
        """So that a text's answer does not depend on the texts beside it."""
        return None if way.seed is None else [[way.seed, *one.ids] for one in coded]

    def _alignments(self, coded: list[Coded], request: Request, found: list[list[Hypothesis]]) -> Iterator[Alignment]:
        """Of all answers, in their order."""
        asked = [row for row, answers in enumerate(found) for _ in answers]
        given = [answer for answers in found for answer in answers]
        tokens, valid = self._padded([[*self.opening, *answer.tokens] for answer in given], self.target.pad)
        memory = select(request.memory, torch.tensor(asked, device=self.device))
        looked = looks(self.model, tokens, valid, memory).cpu()
        for row, answer, weights in zip(asked, given, looked, strict=True):
            source = self.source.tokens(coded[row].ids)
            target = self.target.tokens([*answer.tokens, *([self.target.end] if answer.ended else [])])
            begun = len(self.opening) - 1
            yield Alignment(weights[begun : begun + len(target), : len(source)].tolist(), source, target)


def load(folder: str | Path, device: str = "cpu", int8: bool = False) -> Run | Reader | NodeLabeller:
    """A run folder, as `regard train` leaves it. One that was stopped early gives its newest checkpoint, and its
    `note` says so. int8: with weights of eight bits: see kernels/int8.py."""
    loaded = _load(Path(folder), device)
    if int8:
        quantise(loaded.model)
    return loaded


def _load(folder: Path, device: str) -> Run | Reader | NodeLabeller:
    if not folder.is_dir():
        raise UserError(f"there is no run folder '{short(folder)}'")
    told = about(folder)
    graph = told.get("tokenizers") == []  # nothing is read in tokens
    source, target = (None, None) if graph else tokenizers(folder)
    must_have(device)
    finished = (folder / "model.safetensors").is_file()
    model, note = (restore(folder, device), "") if finished else _unfinished(folder, device)
    if graph:
        return face_of(model)(model, folder, note)
    assert source is not None
    assert target is not None
    hashes = told.get("tokenizers") or [None, None]
    head = getattr(model, "head", None)
    classes = getattr(head, "classes", None)  # the target's tokens are labels, after the special ones
    said = model.vocab if classes is None else target.size - target.labels + classes
    sides = (("source", source, model.source_vocab, hashes[0]), ("target", target, said, hashes[-1]))
    for side, tokenizer, size, known in sides:
        if tokenizer.size > size or (tokenizer.size < size and "origin" not in told):  # others pad their tables
            raise UserError(
                f"{short(folder)}: the {side} tokenizer has {tokenizer.size} tokens and the model {size}: they do not "
                "belong together"
            )
        if known is not None and tokenizer.hash() != known:
            raise UserError(f"{short(folder)}: the {side} tokenizer is not the one that this model was trained with")
    face = face_of(model)
    if face is Run:
        return Run(model, source, target, folder, bool(told.get("documents", True)), note, "origin" in told)
    return face(model, source, target, folder, note)


def must_have(device: str) -> None:
    """Refuse a device that is not here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"there is no device '{device}' here: {in_one_line(error)}") from None


# What a model has learned, and where it matters what it reads -> module and class in regard/use that answers with it;
# else it is a Run.
FACES = {
    "classify": "label.Labeller",
    "classify images": "images.ImageLabeller",
    "contrastive": "towers.Pairer",
    "match": "match.Matcher",
    "tag": "tag.Tagger",
    "embed": "embed.Embedder",
    "masked": "fill.Filler",
    "nodes": "nodes.NodeLabeller",
    "permuted": "onward.Onward",
    "span_corruption": "spans.SpanFiller",
    "transcribe": "transcribe.Transcriber",
}


def face_of(model: Model) -> Any:
    """The class that answers with such a model."""
    objective = getattr(model, "recipe", {}).get("objective", {}).get("part", "next_token")
    reads = getattr(getattr(model, "embed", None), "reads", "text")
    module, _, face = (FACES.get(f"{objective} {reads}") or FACES.get(objective, "")).partition(".")
    return getattr(import_module(f"regard.use.{module}"), face) if face else Run


def _unfinished(folder: Path, device: str) -> tuple[Model, str]:
    """The newest whole checkpoint, and a sentence about it."""
    path, numbers, complaints = checkpoint.newest(folder / "checkpoints")
    if path is None:
        why = f" ({complaints[0]})" if complaints else ""
        raise UserError(f"{short(folder)} holds no model yet, neither a finished one nor a whole checkpoint{why}")
    model = build(folder / "recipe.toml")
    checkpoint.read(path, model)
    note = f"this run is not finished: this is the model of step {numbers['step']:,}"
    return model.to(device), "; ".join([note, *complaints])


def tokenizers(folder: Path) -> tuple[Tokenizer, Tokenizer]:
    """The source's and the target's, one and the same when they are joint."""
    told = about(folder)
    marks = told.get("marks")  # of a model that came from elsewhere
    joint = folder / "tokenizer.json"
    if joint.is_file():
        one = Tokenizer.load(joint, marks)
        return one, one
    source, target = (folder / f"{side}.tokenizer.json" for side in ("source", "target"))
    if marks is not None and not source.is_file():
        raise UserError(f"{short(folder)} holds no tokenizer.json, and texts cannot be read without one: put it there")
    return Tokenizer.load(source, marks), Tokenizer.load(target, told.get("target_marks", marks))


def about(folder: Path) -> dict[str, Any]:
    """What run.json says."""
    path = folder / "run.json"
    if not path.is_file():
        raise UserError(f"{short(folder)} is not a run folder: it holds no run.json (a model alone: regard.restore)")
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{short(path)} cannot be read: {in_one_line(error)}") from None
    if not isinstance(told, dict):
        raise UserError(f"{short(path)} does not tell about a run")
    return told
