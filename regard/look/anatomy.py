"""What stands in a model: its parts in order, their sizes, what they cost and how that grows. Data, to be drawn."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from regard.core import Embed, Growth, Mixer, Model, Norm, Pattern, Pointwise, Stack, Towers
from regard.files.recipe import Recipe
from regard.schema import name_of

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
    pools: bool = False  # which is one vector per sequence

    @property
    def boxes(self) -> list[Box]:
        return [*self.before, *(box for group in self.groups for layer in group.layers for box in layer), *self.after]


@dataclass(frozen=True)
class Spent:
    """Flops and bytes at a length; None where there is no such thing. `side`: of which of two towers."""

    length: int
    token: int | None
    whole: int | None
    encoder: int | None
    state: int | None
    note: str = ""
    side: str = ""


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
    vocab: list[int]  # of both sides; empty where no text is read
    parameters: int
    towers: list[Tower]
    head: Box
    scores: str  # the shape of what it gives
    spent: list[Spent]
    grows: list[Grows]
    patterns: dict[str, list[str]] = field(default_factory=dict)  # by pattern, the places where it is used
    passes: list[str] = field(default_factory=list)  # what changed it once it was built


def describe(model: Model | Towers) -> Picture:
    """Everything that there is to show about a model made from a recipe, with weights or without."""
    recipe: Recipe = model.recipe  # type: ignore[assignment]
    return _side_by_side(model, recipe) if isinstance(model, Towers) else _described(model, recipe)


def _side_by_side(model: Towers, recipe: Recipe) -> Picture:
    """Each tower with its head on top, and what compares the two above them."""
    drawn = {
        side: _described(one, recipe | {"model": recipe["model"][side]}, side) for side, one in model.towers.items()
    }
    image, text = drawn.values()
    patterns = dict(image.patterns)
    for pattern, places in text.patterns.items():
        patterns[pattern] = [*patterns.get(pattern, []), *places]
    return replace(
        text,
        kind=model.kind,
        parameters=count(model),
        towers=[_under_its_head(one) for one in drawn.values()],
        head=Box("scale", "cosine", "", (text.head.width[1], 1), model.scale.numel()),
        scores="(images, texts)",
        spent=[replace(one.spent[0], side=side) for side, one in drawn.items()],
        grows=[*image.grows, *text.grows],
        patterns=patterns,
    )


def _under_its_head(picture: Picture) -> Tower:
    tower, head = picture.towers[0], picture.head
    return replace(tower, after=[*tower.after, head], width=head.width[1], pools=True)


def _described(model: Model, recipe: Recipe, side: str = "") -> Picture:
    """side: the name of a tower of two."""
    seen = [module for module in (model.source_embed, model.embed) if module is not None]
    tied = any(p is q for p in model.head.parameters() for embed in seen for q in embed.parameters())
    gives = [p.shape[0] for p in model.head.parameters() if p.dim() == 2][-1:] or [model.stack.width]
    head = Box(
        "head", name_of(model.head), _given(recipe["model"].get("head")), (model.stack.width, gives[0]),
        count(*seen, model.head) - count(*seen), tied,
    )  # fmt: skip
    patterns: dict[str, list[str]] = {}
    for where, branch, mixer in _mixers(model, side):
        pattern = getattr(mixer, "pattern", None)
        if isinstance(pattern, Pattern) and pattern.fixed:
            places = patterns.setdefault(str(pattern), [])
            places += [place] if (place := f"{where} {branch}") not in places else []
    shape = f"(batch, {'' if model.head.pools else 'time, '}{head.width[1]:,})"
    vocab = [model.source_vocab, model.vocab] if any(embed.reads == "text" for embed in seen) else []
    lengths = LENGTHS if model.limit is None or model.limit >= LENGTHS[0] else (model.limit,)
    return Picture(
        recipe.get("title", "Untitled"), recipe.get("year"), recipe.get("paper", ""), recipe.get("idea", ""),
        model.kind, model.width, vocab, count(model),
        _towers(model, recipe["model"], side), head, shape, [spent(model, length) for length in lengths],
        grows(model, side), patterns, [_said(spec) for spec in recipe["model"].get("passes", [])],
    )  # fmt: skip


def _mixers(model: Model, tower: str = "") -> list[tuple[str, str, Mixer]]:
    """Side, branch and mixer, of every kind of layer once."""
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
        size = count(*others, embed) - count(*others)
        box = Box(
            "embed", name_of(embed), _given(own.get("embed", table.get("embed"))),
            (_takes(embed, model.source_vocab if embed is model.source_embed else model.vocab), model.width),
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


def _takes(embed: Embed, vocab: int) -> int:
    """Words that it knows, or numbers that make one of its vectors."""
    return vocab if embed.reads == "text" else embed.random_input(1, 1).shape[-1]


def _box(name: str, spec: Any, module: nn.Module, width: int, told: dict[str, Any] | None = None) -> Box:
    return Box(name, name_of(module), _given(spec, told), (width, width), count(module))


def _groups(stack: Stack, tables: Any) -> list[Group]:
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
        end = at + run * times
        before, after = ([stack.position, *stack._layers[:n]] for n in (at, end))
        size = count(*after) - count(*before)  # layers may share some of their weights, or all
        groups.append(Group(times, layers[at : at + run], size))
        at = end
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


def grows(model: Model, tower: str = "") -> list[Grows]:
    """The three columns of Table 1 of Vaswani et al. 2017 for every different mixer; feed-forwards move nothing."""
    lines: dict[tuple[str, Growth], list[str]] = {}
    for side, branch, mixer in _mixers(model, tower):
        if not isinstance(mixer, Pointwise):
            places = lines.setdefault((name_of(mixer), mixer.growth()), [])
            places += [place] if (place := f"{side} {branch}") not in places else []
    return [Grows(", ".join(places), part, *growth) for (part, growth), places in lines.items()]
