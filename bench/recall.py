"""Recall across segments: a few facts are hidden in noise and asked for several segments later, beyond the reach of a
window.

    python bench/recall.py                     prints the table
    python bench/recall.py --write             and puts it into bench/RESULTS.md

A fact is a token that means "this key has that value". A sequence is `reach` segments of noise with some facts at
random positions, followed by a question for each of their keys in another order, to be answered by the value. Only the
answers are trained on. Training begins with a reach of 0, where the facts are in the segment of the questions, and goes
one segment further whenever nine answers of ten are right, since nothing is learned from afar at first. Models are
tested at the full reach on new samples, with the same width, depth, batches and minutes for all.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
import results
from regard.core import Model

NOISE, KEYS, VALUES = 8, 8, 8
FACTS = NOISE  # the first of KEYS * VALUES tokens, each a key with a value
ASKS = FACTS + KEYS * VALUES  # the first of KEYS tokens, each asking for one
RECENT = 30  # steps whose answers decide whether to go further
ENOUGH = 0.9


class Quiz(NamedTuple):
    """A batch: tokens (batch, time), of which the last are the questions; answers (batch, facts); and far (batch,
    facts), the segments between a fact and its question."""

    tokens: Tensor
    answers: Tensor
    far: Tensor


def quiz(batch: int, reach: int, segment: int, facts: int, chance: torch.Generator) -> Quiz:
    """Return a new random batch; a model that remembers nothing answers by chance."""

    def some(most: int, count: int) -> Tensor:
        """Return (batch, count) distinct numbers below `most`."""
        return torch.rand(batch, most, generator=chance).argsort(1)[:, :count]

    body = reach * segment or segment - facts
    tokens = torch.randint(NOISE, (batch, body), generator=chance)
    keys, values = some(KEYS, facts), torch.randint(VALUES, (batch, facts), generator=chance)
    places = some(body, facts)  # in any order, so that questions come in another one
    tokens.scatter_(1, places, FACTS + keys * VALUES + values)
    return Quiz(torch.cat((tokens, ASKS + keys), 1), values, reach - places // segment)


def contenders(given: argparse.Namespace) -> dict[str, tuple[str, dict[str, object]]]:
    """Return recipes and their changes."""
    segment, hidden = given.segment, 4 * given.width
    plain = {"depth": given.depth, "layer.0.feedforward.hidden": hidden}
    return {
        "window": ("transformer-decoder", plain | {"layer.0.mixer.pattern": f"causal & window({segment})"}),
        "transformer-xl": (
            "transformer-xl",
            plain | {"layer.0.mixer.pattern": f"causal & block({segment}, before={given.memory * segment})"},
        ),
        "rmt": (
            "rmt",
            {
                "layer.0.mixer.segment": segment,
                "layer.0.mixer.memory": given.vectors,
                "layer.0.mixer.depth": given.depth,
                "layer.0.mixer.position": "none",  # places as all others here have them
                "layer.0.mixer.layer.0.mixer": "{part='attention', position='rotary'}",
                "layer.0.mixer.layer.0.feedforward.hidden": hidden,
            },
        ),
        "infini": ("infini", plain | {"layer.0.mixer.segment": segment}),
    }


def make(name: str, given: argparse.Namespace) -> Model:
    torch.manual_seed(given.seed)
    recipe, changes = contenders(given)[name]
    changes = {"width": given.width, "heads": given.heads, "dropout": 0.0, **changes}
    overrides = [f"model.{k}={v}" for k, v in changes.items()]
    return regard.build(recipe, size="tiny", vocab=ASKS + KEYS, overrides=overrides)


def answer(model: Model, asked: Quiz) -> tuple[Tensor, Tensor]:
    """Return the loss of the answers, and which are right: (batch, facts)."""
    scores = model(asked.tokens)[:, -asked.answers.shape[1] :, :VALUES]
    return F.cross_entropy(scores.flatten(0, 1), asked.answers.flatten()), scores.argmax(-1) == asked.answers


def learn(model: Model, given: argparse.Namespace) -> tuple[int, int]:
    """Train until the time is over, and return the steps and the reach."""
    chance = torch.Generator().manual_seed(given.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, betas=(0.9, 0.98), weight_decay=0.01)
    steps, reach, recent = 0, 0, []
    end = time.perf_counter() + 60 * given.minutes
    model.train()
    while time.perf_counter() < end:
        for group in optimizer.param_groups:
            group["lr"] = given.lr * min((steps + 1) / 100, 1.0)
        loss, right = answer(model, quiz(given.batch, reach, given.segment, given.facts, chance))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
        recent = [*recent, float(right.float().mean())][-RECENT:]
        if reach < given.reach and len(recent) == RECENT and sum(recent) / RECENT > ENOUGH:
            reach, recent = reach + 1, []
            left = (end - time.perf_counter()) / 60
            results.console.print(f"[dim]{steps:,} steps: now {reach} segments back, {left:.1f} minutes left[/]")
    return steps, reach


@torch.no_grad()
def test(model: Model, given: argparse.Namespace) -> list[float]:
    """Return the share of right answers by distance, from 1 segment to the full reach."""
    chance, right, far = torch.Generator().manual_seed(given.seed + 1), [], []
    model.eval()
    for _ in range(max(given.questions // (given.batch * given.facts), 1)):
        asked = quiz(given.batch, given.reach, given.segment, given.facts, chance)
        right.append(answer(model, asked)[1])
        far.append(asked.far)
    hits, distance = torch.cat(right).flatten().float(), torch.cat(far).flatten()
    return [float(hits[distance == d].mean()) for d in range(1, given.reach + 1)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5, help="of learning, for each")
    parser.add_argument("--reach", type=int, default=8, help="segments of noise before the question")
    parser.add_argument("--segment", type=int, default=32)
    parser.add_argument("--facts", type=int, default=4)
    parser.add_argument("--memory", type=int, default=4, help="segments that transformer-xl sees before its own")
    parser.add_argument("--vectors", type=int, default=8, help="of rmt's memory")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--questions", type=int, default=6000)
    parser.add_argument("--only", nargs="+", help="these contenders")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="put the table into bench/RESULTS.md")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    torch.set_num_threads(given.threads)
    rows = []
    for name in given.only or contenders(given):
        model = make(name, given)
        with results.console.status(f"{name} learns for {given.minutes:g} minutes"):
            steps, reach = learn(model, given)
        found = test(model, given)
        results.console.print(f"{name}: {' '.join(f'{x:.0%}' for x in found)}")
        held = model.cost(1, given.reach * given.segment).state
        size = sum(p.numel() for p in model.parameters())
        rows.append(
            [name, f"{size:,}", f"{steps:,}", str(reach), f"{held / 1000:,.0f} kB", *(f"{x:.0%}" for x in found)]
        )
    head = ["model", "parameters", "steps", "reach learned", "state", *(f"{d} back" for d in range(1, given.reach + 1))]
    notes = [
        f"{results.conditions(given.threads)} Seed {given.seed}.",
        f"{given.facts} facts in {given.reach} segments of {given.segment}; width {given.width}, depth {given.depth}, "
        f"batches of {given.batch}, {given.minutes:g} minutes each. By chance {1 / VALUES:.0%}.",
        f"window sees {given.segment} positions in each layer, so {given.depth} layers reach {given.depth} segments "
        f"back; transformer-xl sees {given.memory} segments before its own, rmt carries {given.vectors} vectors.",
    ]
    text = [*(f"- {note}" for note in notes), "", *results.table(head, rows)]
    if given.write:
        results.write("Recall across segments", text)


if __name__ == "__main__":
    main()
