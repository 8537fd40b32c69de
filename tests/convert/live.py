"""A model of `transformers` with random weights, and ours with the same by its family's own rules."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.convert.family import Config, Family, family_of
from regard.convert.rules import Rule
from regard.core import Model, build


class Twins(NamedTuple):
    """theirs: the model of `transformers`; rules: by which ours got its weights."""

    theirs: Any
    ours: Model
    family: Family
    config: Config
    rules: list[Rule]


def randomise(model: nn.Module, by: float = 0.2, seed: int = 1) -> nn.Module:
    """Every number that is saved is moved away from where it begins: norms and biases, too."""
    draw = torch.Generator().manual_seed(seed)
    saved = model.state_dict(keep_vars=True).values()
    with torch.no_grad():
        for tensor in {id(t): t for t in saved if t.is_floating_point()}.values():
            tensor.add_(torch.randn(tensor.shape, generator=draw) * by)
    return model


def config_of(theirs: Any) -> Config:
    """As its config.json would say it."""
    config = copy.deepcopy(theirs.config)
    config.architectures = [type(theirs).__name__]
    return json.loads(config.to_json_string())


def saved(theirs: nn.Module) -> list[str]:
    """The tensors that a file of it has: what is tied stands there once."""
    once = {tensor.data_ptr(): name for name, tensor in reversed(theirs.state_dict().items())}
    return sorted(once.values())


def twins(theirs: Any, seed: int = 1) -> Twins:
    """Random weights for theirs, the same for ours. Nothing may be left over on either side, and what goes out again is
    what came in, bit by bit."""
    randomise(theirs.eval(), seed=seed)
    told = config_of(theirs)
    family = family_of(told)
    config = family.complete(told | family.config_from_tensors(told, saved(theirs)))
    made = family.recipe(config)
    back = family.config(made)
    assert family.recipe(family.complete(json.loads(json.dumps(back)))) == made, "recipe -> config -> recipe"
    ours = build(made).eval()
    tensors = theirs.state_dict()
    rules = list(family.rules(config, set(tensors)))
    _load(ours, rules, tensors)
    left = set(tensors) - {rule.theirs for rule in rules} - set(family.aliases(config))
    left = {name for name in left if not family.ignores(name)}
    assert not left, f"theirs has {sorted(left)}, and no rule takes them"
    for second, first in family.aliases(config).items():
        if second in tensors and not family.ignores(second):
            assert torch.equal(tensors[second], tensors[first]), f"{second} is not {first}"
    return Twins(theirs, ours, family, config, rules)


def _load(ours: Model, rules: Sequence[Rule], tensors: dict[str, Tensor]) -> None:
    own = ours.state_dict(keep_vars=True)
    filled: set[int] = set()
    for rule in rules:
        assert rule.theirs in tensors, f"there is no {rule.theirs} in theirs"
        parts = rule.split(tensors[rule.theirs])
        assert torch.equal(rule.join(parts), tensors[rule.theirs]), f"{rule.theirs} does not come back"
        for name, value in zip(rule.ours, parts, strict=True):
            assert own[name].shape == value.shape, f"{name} is {tuple(own[name].shape)}, given {tuple(value.shape)}"
            assert id(own[name]) not in filled, f"{name} is given twice"
            filled.add(id(own[name]))
            with torch.no_grad():
                own[name].copy_(value)
    empty = [name for name, tensor in own.items() if id(tensor) not in filled]
    assert not empty, f"nothing is given for {empty}"


def near(ours: Tensor, theirs: Tensor, what: str = "the output", limit: float = 1e-5) -> None:
    """Relative to the size of what is compared."""
    assert ours.shape == theirs.shape, f"{what}: ours is {tuple(ours.shape)}, theirs {tuple(theirs.shape)}"
    gap = float((ours - theirs).detach().abs().max()) / max(1.0, float(theirs.detach().abs().max()))
    assert gap <= limit, f"{what} differs by {gap:.1e}"


def agree(pair: Twins, ours: Sequence[Tensor], theirs: Sequence[Tensor], limit: float = 1e-5) -> None:
    """Outputs, and the gradients of all weights under random cotangents. Where rows are padded, give the real positions
    alone: [y[valid]]."""
    draw = torch.Generator().manual_seed(2)
    losses = [torch.zeros(()), torch.zeros(())]
    for one, two in zip(ours, theirs, strict=True):
        near(one, two, limit=limit)
        cotangent = torch.randn(two.shape, generator=draw)
        losses = [losses[0] + (one * cotangent).sum(), losses[1] + (two * cotangent).sum()]
    for model, loss in zip((pair.ours, pair.theirs), losses, strict=True):
        model.zero_grad()
        loss.backward()
    gradients(pair, limit)


def gradients(pair: Twins, limit: float = 1e-5) -> None:
    """Of all weights, by the rules, once both have been through `backward`."""
    own, their = dict(pair.ours.named_parameters(remove_duplicate=False)), dict(pair.theirs.named_parameters())
    seen = 0
    for rule in pair.rules:
        if rule.theirs not in their or their[rule.theirs].grad is None:
            continue
        parts = [torch.zeros_like(own[name]) if own[name].grad is None else own[name].grad for name in rule.ours]
        near(rule.join(parts), their[rule.theirs].grad, f"the gradient of {rule.theirs}", limit)
        seen += 1
    assert seen, "no gradient was compared"


def in_steps(model: Model, tokens: Tensor, sizes: Sequence[int], **given: Any) -> Tensor:
    """The scores of a decoder, taken in steps of these sizes."""
    with torch.no_grad():
        state, outputs, begin = model.start(tokens.shape[0], tokens.shape[1], **given), [], 0
        for size in sizes:
            y, state = model.step(tokens[:, begin : begin + size], state)
            outputs.append(y)
            begin += size
    assert begin == tokens.shape[1], "the sizes must sum to the length"
    return torch.cat(outputs, 1)


def mask(lengths: Sequence[int]) -> Tensor:
    """(batch, time): which positions are real; padding is on the right."""
    return torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
