"""A summary of a model as data: its parts in order, their sizes, their costs, and how these grow with the length."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from regard.core import Embed, Growth, Mixer, Model, Norm, Pattern, Pointwise, Stack, Towers
from regard.files.recipe import Recipe
from regard.schema import name_of

from .sketch import count_parameters, stacks_of

LENGTHS = (512, 8192)


@dataclass(frozen=True)
class Box:
    """One part: its name in the recipe, its arguments, its input and output width, and its number of parameters."""

    name: str
    part: str
    given: str
    width: tuple[int, int]
    parameters: int
    tied: bool = False


@dataclass(frozen=True)
class Group:
    """Layers that are repeated `times` times. `parameters` counts all repetitions."""

    times: int
    layers: list[list[Box]]
    parameters: int


@dataclass(frozen=True)
class Tower:
    """One stack of a model, in the order of the data, with the parts before and after its layers."""

    side: str
    depth: int
    shared: bool
    before: list[Box]
    groups: list[Group]
    after: list[Box]
    width: int  # of its output
    pools: bool = False  # the output is one vector per sequence

    @property
    def boxes(self) -> list[Box]:
        return [*self.before, *(box for group in self.groups for layer in group.layers for box in layer), *self.after]


@dataclass(frozen=True)
class CostAtLength:
    """Flops and bytes at a length; None where a cost does not exist. `side`: which of two towers."""

    length: int
    token: int | None
    whole: int | None
    encoder: int | None
    state: int | None
    note: str = ""
    side: str = ""


@dataclass(frozen=True)
class GrowthRow:
    """A row of Table 1 of Vaswani et al. 2017."""

    where: str
    part: str
    complexity: str
    sequential: str
    path: str


@dataclass(frozen=True)
class ModelSummary:
    title: str
    year: int | None
    paper: str
    idea: str
    kind: str
    width: int
    vocab: list[int]  # sizes of both sides; empty if it reads no text
    parameters: int
    towers: list[Tower]
    head: Box
    scores: str  # the shape of its output
    spent: list[CostAtLength]
    grows: list[GrowthRow]
    patterns: dict[str, list[str]] = field(default_factory=dict)  # where each pattern is used
    passes: list[str] = field(default_factory=list)  # passes applied to the built model
    is_parallel: bool = False  # the decoder writes all tokens at once


def describe(model: Model | Towers) -> ModelSummary:
    """Summarize a model made from a recipe, with weights or without."""
    recipe: Recipe = model.recipe  # type: ignore[assignment]
    return _summarize_towers(model, recipe) if isinstance(model, Towers) else _summarize(model, recipe)


def _summarize_towers(model: Towers, recipe: Recipe) -> ModelSummary:
    """Summarize two towers, each with its head, and the comparison of the two."""
    summaries = {
        side: _summarize(one, recipe | {"model": recipe["model"][side]}, side) for side, one in model.towers.items()
    }
    image, text = summaries.values()
    patterns = dict(image.patterns)
    for pattern, places in text.patterns.items():
        patterns[pattern] = [*patterns.get(pattern, []), *places]
    return replace(
        text,
        kind=model.kind,
        parameters=count_parameters(model),
        towers=[_tower_with_head(one) for one in summaries.values()],
        head=Box("scale", "cosine", "", (text.head.width[1], 1), model.scale.numel()),
        scores="(images, texts)",
        spent=[replace(one.spent[0], side=side) for side, one in summaries.items()],
        grows=[*image.grows, *text.grows],
        patterns=patterns,
    )


def _tower_with_head(summary: ModelSummary) -> Tower:
    tower, head = summary.towers[0], summary.head
    return replace(tower, after=[*tower.after, head], width=head.width[1], pools=True)


def _summarize(model: Model, recipe: Recipe, side: str = "") -> ModelSummary:
    """Summarize one model. `side` is its name among two towers."""
    embeds = [module for module in (model.source_embed, model.embed) if module is not None]
    tied = any(p is q for p in model.head.parameters() for embed in embeds for q in embed.parameters())
    outputs = [p.shape[0] for p in model.head.parameters() if p.dim() == 2][-1:] or [model.stack.width]
    head = Box(
        "head", name_of(model.head), _arguments(recipe["model"].get("head")), (model.stack.width, outputs[0]),
        count_parameters(*embeds, model.head) - count_parameters(*embeds), tied,
    )  # fmt: skip
    patterns: dict[str, list[str]] = {}
    for where, branch, mixer in _mixers(model, side):
        pattern = getattr(mixer, "pattern", None)
        if isinstance(pattern, Pattern) and pattern.fixed:
            places = patterns.setdefault(str(pattern), [])
            places += [place] if (place := f"{where} {branch}") not in places else []
    shape = f"(batch, {'' if model.head.pools else 'time, '}{head.width[1]:,})"
    vocab = [model.source_vocab, model.vocab] if any(embed.reads == "text" for embed in embeds) else []
    lengths = LENGTHS if model.limit is None or model.limit >= LENGTHS[0] else (model.limit,)
    towers = _towers(model, recipe["model"], side)
    if model.length is not None:
        given = _arguments(recipe["model"]["length"])
        box = Box("length", name_of(model.length), given, (model.width, 1), count_parameters(model.length))
        towers[0] = replace(towers[0], after=[*towers[0].after, box])
    return ModelSummary(
        recipe.get("title", "Untitled"), recipe.get("year"), recipe.get("paper", ""), recipe.get("idea", ""),
        model.kind, model.width, vocab, count_parameters(model),
        towers, head, shape, [cost_at(model, length) for length in lengths],
        growth_rows(model, side), patterns, [_format_value(spec) for spec in recipe["model"].get("passes", [])],
        model.length is not None,
    )  # fmt: skip


def _mixers(model: Model, tower: str = "") -> list[tuple[str, str, Mixer]]:
    """Return side, branch and mixer for each kind of layer."""
    return [
        (tower or side, name, mixer)
        for side, stack in stacks_of(model).items()
        for layer in stack._layers[: stack.kinds]
        for name, mixer in layer.branches.items()
    ]


def _towers(model: Model, table: dict[str, Any], tower: str) -> list[Tower]:
    towers = []
    for side, stack in stacks_of(model).items():
        own = table.get(side, {}) if model.encoder is not None else table
        embed = model.source_embed if side == "encoder" and model.source_embed is not None else model.embed
        others = [model.source_embed] if embed is model.embed and model.source_embed is not None else []
        size = count_parameters(*others, embed) - count_parameters(*others)
        box = Box(
            "embed", name_of(embed), _arguments(own.get("embed", table.get("embed"))),
            (_input_size(embed, model.source_vocab if embed is model.source_embed else model.vocab), model.width),
            size, size == 0,
        )  # fmt: skip
        before, after = [box], []
        if own.get("position", "none") != "none":
            before.append(_box("position", own["position"], stack.position, model.width))
        if own.get("norm", "none") != "none":
            after.append(_box("norm", own["norm"], stack.norm, stack.width))
        shared = own.get("share") == "layers"
        groups = _groups(stack, own["layer"])
        towers.append(Tower(tower or side, len(stack._layers), shared, before, groups, after, stack.width))
    return towers


def _input_size(embed: Embed, vocab: int) -> int:
    """Return the size of the vocabulary, or the input channels of one position."""
    return vocab if embed.reads == "text" else embed.random_input(1, 1).shape[-1]


def _box(name: str, spec: Any, module: nn.Module, width: int, derived: dict[str, Any] | None = None) -> Box:
    return Box(name, name_of(module), _arguments(spec, derived), (width, width), count_parameters(module))


def _groups(stack: Stack, tables: Any) -> list[Group]:
    """Return the layers in order, with repeated runs grouped."""
    tables = [tables] if isinstance(tables, dict) else tables
    layers: list[list[Box]] = []
    for index, layer in enumerate(stack._layers):
        table, boxes = tables[index % len(tables)], []
        for name, mixer in layer.branches.items():
            size = count_parameters(stack.position, mixer) - count_parameters(stack.position)
            given = _arguments(table[name], _derived(mixer))
            boxes.append(Box(name, name_of(mixer), given, (mixer.width, mixer.out_width), size))
        norm = next((name_of(m) for m in layer.wiring.modules() if isinstance(m, Norm)), None)
        derived = {} if norm is None else {"norm": norm}
        boxes.append(_box("wiring", table.get("wiring", "pre"), layer.wiring, boxes[-1].width[1], derived))
        layers.append(boxes)
    groups, at = [], 0
    while at < len(layers):
        run, times = _run(layers, at)
        end = at + run * times
        before, after = ([stack.position, *stack._layers[:n]] for n in (at, end))
        size = count_parameters(*after) - count_parameters(*before)  # layers may share weights
        groups.append(Group(times, layers[at : at + run], size))
        at = end
    return groups


def _run(layers: list, at: int) -> tuple[int, int]:
    """Return the length and the repetitions of the run from `at` whose immediate repetitions cover the most layers."""
    best = (1, 1)
    for run in range(1, (len(layers) - at) // 2 + 1):
        times = 1
        while layers[at + times * run : at + (times + 1) * run] == layers[at : at + run]:
            times += 1
        if times > 1 and run * times > best[0] * best[1]:
            best = (run, times)
    return best


def _derived(mixer: Mixer) -> dict[str, Any]:
    """Return the heads and the pattern of a mixer, even if the recipe does not name them."""
    found = {key: getattr(mixer, key, None) for key in ("heads", "kv_heads", "pattern")}
    if found["kv_heads"] == found["heads"]:
        del found["kv_heads"]
    return {key: str(value) for key, value in found.items() if value is not None}


def _arguments(spec: Any, derived: dict[str, Any] | None = None) -> str:
    """Format the arguments of a part in a recipe on one line."""
    given = {key: value for key, value in spec.items() if key != "part"} if isinstance(spec, dict) else {}
    return "  ".join(f"{key} {_format_value(value)}" for key, value in {**(derived or {}), **given}.items())


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{key} {_format_value(each)}" for key, each in value.items() if key != "part")
        return f"{value.get('part', '')}({inner})" if inner else str(value.get("part", "()"))
    if isinstance(value, list):
        return f"[{', '.join(_format_value(each) for each in value)}]"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def cost_at(model: Model, length: int) -> CostAtLength:
    """Return the cost of a sequence of `length` positions, and of one more position after them."""
    limit = model.limit
    if limit is not None and length > limit:
        return CostAtLength(length, None, None, None, None, f"its maximum length is {limit:,}")
    encoder = model.encoder.cost(length).flops // length if model.encoder is not None else None
    whole = model.cost(length).flops // length
    if model.head.pools or not model.stack.streams:
        return CostAtLength(length, None, whole, encoder, None)
    more = model.cost(1, length - 1 if limit == length else length)
    return CostAtLength(length, more.flops, whole, encoder, model.cost(length).state)


def growth_rows(model: Model, tower: str = "") -> list[GrowthRow]:
    """Return the columns of Table 1 of Vaswani et al. 2017 for each different mixer, without feed-forwards."""
    lines: dict[tuple[str, Growth], list[str]] = {}
    for side, branch, mixer in _mixers(model, tower):
        if not isinstance(mixer, Pointwise):
            places = lines.setdefault((name_of(mixer), mixer.growth()), [])
            places += [place] if (place := f"{side} {branch}") not in places else []
    return [GrowthRow(", ".join(places), part, *growth) for (part, growth), places in lines.items()]
