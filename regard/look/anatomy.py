"""What stands in a model: its parts in order, their sizes, what they cost and how that grows. Data, to be drawn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from regard.core import Growth, Mixer, Model, Norm, Pattern, Pointwise, Stack
from regard.core.parts import name_of

from .sketch import count, stacks_of

LENGTHS = (512, 8192)


@dataclass(frozen=True)
class Box:
    """One part: what the recipe calls it, how it was asked for, and its size. `width` is what it takes and gives."""

    name: str
    part: str
    given: str
    width: tuple[int, int]
    parameters: int
    tied: bool = False


@dataclass(frozen=True)
class Group:
    """Layers that come again `times` times. `parameters` are those of all of them."""

    times: int
    layers: list[list[Box]]
    parameters: int


@dataclass(frozen=True)
class Tower:
    """One side of a model, in the order of the data. `before` and `after` are what stands around its layers."""

    side: str
    depth: int
    shared: bool
    before: list[Box]
    groups: list[Group]
    after: list[Box]
    width: int  # of what leaves it

    @property
    def boxes(self) -> list[Box]:
        return [*self.before, *(box for group in self.groups for layer in group.layers for box in layer), *self.after]


@dataclass(frozen=True)
class Spent:
    """Flops and bytes at a length; None where there is no such thing."""

    length: int
    token: int | None
    whole: int | None
    encoder: int | None
    state: int | None
    note: str = ""


@dataclass(frozen=True)
class Grows:
    """A line of the 2017 paper's Table 1."""

    where: str
    part: str
    complexity: str
    sequential: str
    path: str


@dataclass(frozen=True)
class Picture:
    title: str
    year: int | None
    paper: str
    idea: str
    kind: str
    width: int
    vocab: list[int]
    parameters: int
    towers: list[Tower]
    head: Box
    pools: bool  # one answer per sequence
    spent: list[Spent]
    grows: list[Grows]
    patterns: dict[str, list[str]] = field(default_factory=dict)  # by pattern, the places where it is used
    passes: list[str] = field(default_factory=list)  # what changed it once it was built


def describe(model: Model) -> Picture:
    """Everything that there is to show about a model made from a recipe, with weights or without."""
    recipe = model.recipe  # type: ignore[assignment]
    seen = [module for module in (model.source_embed, model.embed) if module is not None]
    tied = any(p is q for p in model.head.parameters() for embed in seen for q in embed.parameters())
    gives = [p.shape[0] for p in model.head.parameters() if p.dim() == 2][-1:] or [model.stack.width]
    head = Box(
        "head", name_of(model.head), _given(recipe["model"].get("head")), (model.stack.width, gives[0]),
        count(*seen, model.head) - count(*seen), tied,
    )  # fmt: skip
    patterns: dict[str, list[str]] = {}
    for side, branch, mixer in _mixers(model):
        pattern = getattr(mixer, "pattern", None)
        if isinstance(pattern, Pattern) and pattern.fixed:
            places = patterns.setdefault(str(pattern), [])
            places += [place] if (place := f"{side} {branch}") not in places else []
    return Picture(
        recipe.get("title", "Untitled"), recipe.get("year"), recipe.get("paper", ""), recipe.get("idea", ""),
        model.kind, model.width, [model.source_vocab, model.vocab], count(model),
        _towers(model), head, model.head.pools, [spent(model, length) for length in LENGTHS], grows(model), patterns,
        [_said(spec) for spec in recipe["model"].get("passes", [])],
    )  # fmt: skip


def _mixers(model: Model) -> list[tuple[str, str, Mixer]]:
    """Side, branch and mixer, of every kind of layer once."""
    return [
        (side, name, mixer)
        for side, stack in stacks_of(model).items()
        for layer in stack._layers[: stack.kinds]
        for name, mixer in layer.branches.items()
    ]


def _towers(model: Model) -> list[Tower]:
    table = model.recipe["model"]  # type: ignore[index]
    towers = []
    for side, stack in stacks_of(model).items():
        own = table.get(side, {}) if model.encoder is not None else table
        embed = model.source_embed if side == "encoder" and model.source_embed is not None else model.embed
        others = [model.source_embed] if embed is model.embed and model.source_embed is not None else []
        size = count(*others, embed) - count(*others)
        box = Box(
            "embed", name_of(embed), _given(own.get("embed", table.get("embed"))),
            (model.source_vocab if embed is model.source_embed else model.vocab, model.width), size, size == 0,
        )  # fmt: skip
        before, after = [box], []
        if own.get("position", "none") != "none":
            before.append(_box("position", own["position"], stack.position, model.width))
        if own.get("norm", "none") != "none":
            after.append(_box("norm", own["norm"], stack.norm, stack.width))
        shared = own.get("share") == "layers"
        groups = _groups(stack, own["layer"], shared)
        towers.append(Tower(side, len(stack._layers), shared, before, groups, after, stack.width))
    return towers


def _box(name: str, spec: Any, module: nn.Module, width: int, told: dict[str, Any] | None = None) -> Box:
    return Box(name, name_of(module), _given(spec, told), (width, width), count(module))


def _groups(stack: Stack, tables: Any, shared: bool) -> list[Group]:
    """The layers in order, a run that comes again drawn once."""
    tables = [tables] if isinstance(tables, dict) else tables
    layers: list[list[Box]] = []
    for index, layer in enumerate(stack._layers):
        table, boxes = tables[index % len(tables)], []
        for name, mixer in layer.branches.items():
            size = count(stack.position, mixer) - count(stack.position)
            given = _given(table[name], _told(mixer))
            boxes.append(Box(name, name_of(mixer), given, (mixer.width, mixer.out_width), size))
        norm = next((name_of(m) for m in layer.wiring.modules() if isinstance(m, Norm)), None)
        told = {} if norm is None else {"norm": norm}
        boxes.append(_box("wiring", table.get("wiring", "pre"), layer.wiring, boxes[-1].width[1], told))
        layers.append(boxes)
    groups, at = [], 0
    while at < len(layers):
        run, times = _run(layers, at)
        sizes = [box.parameters for layer in layers[at : at + run] for box in layer]
        groups.append(Group(times, layers[at : at + run], sum(sizes) * (1 if shared else times)))
        at += run * times
    return groups


def _run(layers: list, at: int) -> tuple[int, int]:
    """The shortest run from `at` that covers most by coming again at once, and how often it comes."""
    best = (1, 1)
    for run in range(1, (len(layers) - at) // 2 + 1):
        times = 1
        while layers[at + times * run : at + (times + 1) * run] == layers[at : at + run]:
            times += 1
        if times > 1 and run * times > best[0] * best[1]:
            best = (run, times)
    return best


def _told(mixer: Mixer) -> dict[str, Any]:
    """What a mixer has, said or not, that a reader looks for."""
    told = {key: getattr(mixer, key, None) for key in ("heads", "kv_heads", "pattern")}
    if told["kv_heads"] == told["heads"]:
        del told["kv_heads"]
    return {key: str(value) for key, value in told.items() if value is not None}


def _given(spec: Any, told: dict[str, Any] | None = None) -> str:
    """A part's arguments as a recipe gives them, on one line."""
    given = {key: value for key, value in spec.items() if key != "part"} if isinstance(spec, dict) else {}
    return "  ".join(f"{key} {_said(value)}" for key, value in {**(told or {}), **given}.items())


def _said(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{key} {_said(each)}" for key, each in value.items() if key != "part")
        return f"{value.get('part', '')}({inner})" if inner else str(value.get("part", "()"))
    if isinstance(value, list):
        return f"[{', '.join(_said(each) for each in value)}]"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def spent(model: Model, length: int) -> Spent:
    """What a sequence of `length` positions takes, and one more position after them."""
    limit = model.limit
    if limit is not None and length > limit:
        return Spent(length, None, None, None, None, f"its positions reach {limit:,}")
    encoder = model.encoder.cost(length).flops // length if model.encoder is not None else None
    whole = model.cost(length).flops // length
    if model.head.pools or not model.stack.streams:
        return Spent(length, None, whole, encoder, None)
    more = model.cost(1, length - 1 if limit == length else length)
    return Spent(length, more.flops, whole, encoder, model.cost(length).state)


def grows(model: Model) -> list[Grows]:
    """The three columns of Table 1 of Vaswani et al. 2017 for every different mixer; feed-forwards move nothing."""
    lines: dict[tuple[str, Growth], list[str]] = {}
    for side, branch, mixer in _mixers(model):
        if not isinstance(mixer, Pointwise):
            places = lines.setdefault((name_of(mixer), mixer.growth()), [])
            places += [place] if (place := f"{side} {branch}") not in places else []
    return [Grows(", ".join(places), part, *growth) for (part, growth), places in lines.items()]
