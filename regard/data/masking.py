"""Batches for a masked language model: windows of a text in which some tokens are masked, others in every epoch.

The seed, the epoch and the position in the text decide what is masked, so that a run can resume anywhere.
"""

from __future__ import annotations

import numpy as np
import torch

from regard.core import UserError

from .batches import IGNORE, Batch, pad_rows, plan_batches
from .masks import Pieces, Template, mask_token
from .tokenizer import Tokenizer

HIDDEN, REPLACED = 0.8, 0.1  # shares of the target tokens; the rest are left as they are
NEXT, ELSEWHERE = 0, 1  # labels of a pair: the second text follows the first, or is from elsewhere
TRIES = 20


class TokenMasker:
    """Chooses some tokens of a sequence as targets: most are masked, some replaced by random tokens, some left.

    share:      the share of the tokens that become targets.
    whole_word: the pieces of a word are chosen together.
    """

    def __init__(self, tokenizer: Tokenizer, share: float, whole_word: bool):
        name = mask_token(tokenizer)
        if name is None:
            raise UserError("this tokenizer has no mask token, so nothing can be masked")
        self.share, self.whole_word, self.mask = share, whole_word, tokenizer.inner.token_to_id(name)
        self.pieces = Pieces(tokenizer)
        self.ordinary_ids = np.flatnonzero(self.pieces.ordinary)

    def __call__(self, ids: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs and the targets, (time,) each, with IGNORE where a token is not a target."""
        read, targets = ids.copy(), np.full(len(ids), IGNORE, np.int64)
        maskable = np.flatnonzero(self.pieces.ordinary[ids])
        if len(maskable):
            at = self._choose(ids, maskable, max(round(self.share * len(maskable)), 1), rng)
            targets[at] = ids[at]
            chance = rng.random(len(at))
            read[at[chance < HIDDEN]] = self.mask
            other = at[(chance >= HIDDEN) & (chance < HIDDEN + REPLACED)]
            read[other] = rng.choice(self.ordinary_ids, len(other))
        return read, targets

    def _choose(self, ids: np.ndarray, maskable: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return `count` of the maskable positions. Of whole words at most `count`, unless the first is longer."""
        if not self.whole_word:
            return rng.permutation(maskable)[:count]
        words = self.pieces.words(ids)[maskable]
        _, word, sizes = np.unique(words, return_inverse=True, return_counts=True)
        order = rng.permutation(len(sizes))
        taken, left = np.zeros(len(sizes), bool), count
        for one in order:
            if sizes[one] <= left:
                taken[one] = True
                left -= sizes[one]
                if not left:
                    break
        if left == count:
            taken[order[0]] = True
        return maskable[taken[word]]


class MaskedBatches:
    """Batches of windows of one long text, which every epoch cuts at new positions.

    stream:        (time,) the token ids of the text.
    masker:        chooses the targets.
    context:       positions of a row, special tokens included.
    budget:        positions of a batch.
    next_sentence: a row is two texts: half of the second ones follow the first, half are from elsewhere.
    documents:     the two texts of a pair that follow each other are from one document.
    """

    def __init__(
        self,
        stream: np.ndarray,
        tokenizer: Tokenizer,
        masker: TokenMasker,
        context: int,
        budget: int,
        seed: int,
        next_sentence: bool = False,
        documents: bool = False,
        shuffle: bool = True,
    ):
        self.stream, self.tokenizer, self.masker, self.seed, self.shuffle = stream, tokenizer, masker, seed, shuffle
        self.next_sentence, self.budget = next_sentence, budget
        self.template = Template.read(tokenizer, 2 if next_sentence else 1)
        self.max_text_tokens, self.min_text_tokens = context - self.template.size, 2 if next_sentence else 1
        if self.max_text_tokens < self.min_text_tokens:
            raise UserError(
                f"train.context_length of {context} leaves no position for text besides {self.template.size} "
                "special tokens"
            )
        ends = np.flatnonzero(np.asarray(stream) == tokenizer.end) if next_sentence and documents else np.array([], int)
        if not len(ends) or ends[-1] < len(stream) - 1:
            ends = np.append(ends, len(stream))
        begins = np.concatenate(([0], ends[:-1] + 1))
        long = ends - begins >= self.min_text_tokens
        self.begins, self.ends = begins[long], ends[long]  # of every document
        if not len(self.begins):
            raise UserError(
                f"no text is long enough: a row takes {self.min_text_tokens} tokens at the least, besides its marks"
            )

    def epoch(self, number: int) -> list[np.ndarray]:
        """Return the rows of each batch, (rows, 3): the epoch, and where in the stream the row begins and ends."""
        rng = np.random.default_rng((self.seed, number))
        begins, ends = self._cuts(rng)
        lengths = (ends - begins + self.template.size)[:, None]
        batches = plan_batches(lengths, self.budget, rng)
        if not self.shuffle:
            batches = sorted(batches, key=lambda batch: int(batch[0]))
        rows = np.stack((np.full_like(begins, number), begins, ends), 1)
        return [rows[batch] for batch in batches]

    def _cuts(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return where rows begin and end. All but the first and the last row of a document are full."""
        sizes = self.ends - self.begins
        shift = rng.integers(self.max_text_tokens, size=len(sizes)) if self.shuffle else np.zeros_like(sizes)
        shift = np.where(sizes > self.max_text_tokens, shift, 0)
        counts = (shift > 0) + -(-(sizes - shift) // self.max_text_tokens)
        of = np.repeat(np.arange(len(sizes)), counts)
        rank = np.arange(len(of)) - np.repeat(counts.cumsum() - counts, counts)
        first = (shift[of] > 0) & (rank == 0)
        begins = self.begins[of] + shift[of] + (rank - (shift[of] > 0)) * self.max_text_tokens
        ends = np.minimum(begins + self.max_text_tokens, self.ends[of])
        begins = np.where(first, self.begins[of], begins)
        kept = ends - begins >= self.min_text_tokens
        return begins[kept], ends[kept]

    def make(self, numbers: np.ndarray) -> Batch:
        read, asked, segments, second = [], [], [], []
        for epoch, begin, end in numbers.tolist():
            rng = np.random.default_rng((self.seed, epoch, begin))
            texts = [self.stream[begin:end]]
            if self.next_sentence:
                texts, label = self._pair(begin, end, rng)
                second.append(label)
            ids, of = self.template.apply(texts)
            tokens, targets = self.masker(ids, rng)
            read.append(tokens)
            asked.append(targets)
            segments.append(of)
        tokens, valid = pad_rows(read, self.tokenizer.pad)
        targets, _ = pad_rows(asked, IGNORE)
        return Batch(
            tokens, targets, None if bool(valid.all()) else valid, count=max(int((targets != IGNORE).sum()), 1),
            segments=pad_rows(segments, 0)[0] if self.next_sentence else None,
            next_sentence_labels=torch.tensor(second) if self.next_sentence else None,
        )  # fmt: skip

    def _pair(self, begin: int, end: int, rng: np.random.Generator) -> tuple[list[np.ndarray], int]:
        """Return two texts, cut at the end of a line if one is near, and the label NEXT or ELSEWHERE."""
        cut = int(rng.integers(begin + 1, end))
        quarter = (end - begin) // 4
        lines = (
            np.flatnonzero(self.masker.pieces.ends_line[self.stream[begin + quarter : end - quarter]]) + begin + quarter
        )
        inside = lines[lines + 1 < end]
        if len(inside):
            cut = int(inside[np.abs(inside - cut).argmin()]) + 1
        far = self._elsewhere(begin, end, end - cut, rng) if rng.random() < 0.5 else None
        second, label = (slice(cut, end), NEXT) if far is None else (far, ELSEWHERE)
        return [self.stream[begin:cut], self.stream[second]], label

    def _elsewhere(self, begin: int, end: int, size: int, rng: np.random.Generator) -> slice | None:
        """Return a range of at most `size` tokens in another document, or far away where there is only one; None: none
        was found."""
        own = int(np.searchsorted(self.begins, begin, "right")) - 1
        for _ in range(TRIES):
            other = int(rng.integers(len(self.begins)))
            at = int(rng.integers(self.begins[other], max(self.ends[other] - size, self.begins[other]) + 1))
            apart = at + size <= begin or at >= end + size if len(self.begins) == 1 else other != own
            if apart:
                return slice(at, min(at + size, int(self.ends[other])))
        return None
