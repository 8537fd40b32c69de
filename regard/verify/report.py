"""Reports: all checks of a recipe or of one part in a file, computed lazily."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.core import Context, Mixer, Model, Norm, Pattern, Place, Position, UserError, Wiring, build, part
from regard.core.contracts import Embed, Head, Score
from regard.errors import in_one_line, nearest, short
from regard.files.recipe import Recipe
from regard.pattern.analysis import first_blind_query
from regard.schema import BUILT_IN, add_folder, class_in, find

from . import golden, laws
from .laws import Finding

WIDTH, HEADS, VOCAB = 24, 3, 61
CONTRACTS = (Mixer, Position, Pattern, Norm, Wiring, Score, Embed, Head)


class Section(NamedTuple):
    """A titled group of findings, computed lazily; or a note why there are none."""

    title: str
    findings: Iterator[Finding]
    note: str = ""


def verify_recipe(recipe: Recipe, seed: int = 0) -> Iterator[Section]:
    """Yield the laws on the built model, then parity with every original implementation that the recipe names."""
    golden.folder()  # report a missing folder first
    torch.manual_seed(seed)
    yield Section("laws", check_laws(build(recipe), seed))
    systems = recipe.get("golden", [])
    if not systems:
        yield Section("parity", iter(()), "the recipe names no golden file, so there is no original to compare with")
    for system in systems:
        yield parity(system)


def check_laws(module: Mixer | Model, seed: int = 0) -> Iterator[Finding]:
    """Yield the findings of all laws that apply to the module."""
    for subject, named_laws in laws.subjects(module):
        for name, law in named_laws.items():
            found = attempt(name, laws.LIMIT, lambda law=law, subject=subject: law(subject), seed)
            yield found._replace(law=name)
            subject.source = 7


def attempt(name: str, limit: float, law: Callable[[], Finding], seed: int = 0) -> Finding:
    """Return the finding of a law. If it raises, the law does not hold, and the finding contains the error."""
    torch.manual_seed(seed)
    try:
        return law()
    except Exception as error:  # a user's part may raise anything
        return Finding(name, float("inf"), limit, f"{type(error).__name__}: {in_one_line(error)}{_where(error)}")


def _where(error: Exception) -> str:
    """Return the file and line of the innermost part in the traceback."""
    at, where = error.__traceback__, ""
    while at is not None:
        path = Path(at.tb_frame.f_code.co_filename)
        if at.tb_frame.f_globals.get("__name__", "").startswith(("regard.parts.", "regard_parts_of_user_")):
            where = f" ({short(path)}, line {at.tb_lineno})"
        at = at.tb_next
    return where


def parity(system: str) -> Section:
    """Compare outputs and gradients with an original implementation: one finding per golden file."""
    title = f"parity with {system}"
    where, files, cases = golden.folder(), golden.golden_files(system), golden.cases()
    if where is None:
        return Section(title, iter(()), f"not compared: golden files are not installed with regard; {golden.HINT}")
    if not files:
        there = f"there is no {system}-*.safetensors in {short(where)}"
        return Section(title, iter(()), f"no golden file: {there}; {golden.HINT}")
    if system not in cases:
        known = nearest(system, cases) if cases else ""
        there = f"neither {short(where)} nor tests/parity of a checkout holds a case for it"
        return Section(title, iter(()), f"not compared: {there}{known}")

    def one(path: Path) -> Finding:
        findings = cases[system](golden.Golden(path))
        worst = max(findings, key=lambda finding: finding.worst / finding.limit)
        return Finding(path.stem, worst.worst, worst.limit, f"{len(findings)} outputs and gradients")

    return Section(title, (attempt(path.stem, 1e-5, lambda path=path: one(path)) for path in files))


def verify_file(file: str | Path, seed: int = 0) -> Iterator[Section]:
    """Verify the part in a Python file, once per entry of its `examples`: a mixer by itself, others inside a model."""
    path = Path(file).resolve()
    if not path.is_file():
        raise UserError(f"there is no file '{file}'")
    if not path.is_relative_to(BUILT_IN):
        add_folder(path.parent)
    contract = next((contract for contract in CONTRACTS if class_in(path, contract)), None)
    if contract is None:
        known = ", ".join(contract.__name__ for contract in CONTRACTS)
        raise UserError(f"{short(path)} should define a class named after the file that is one of {known}")
    name = path.stem
    for example in find(contract, name).examples:
        given = ", ".join(f"{key} = {value!r}" for key, value in example.items())
        title = f"{contract.__name__.lower()} {name}" + (f" with {given}" if given else "")
        torch.manual_seed(seed)
        yield Section(title, _verify_part(contract, {"part": name, **example}, seed))


def _verify_part(contract: type, spec: dict[str, Any], seed: int) -> Iterator[Finding]:
    if contract is Mixer:
        place = Place(encoder=1, decoder=2, memory=WIDTH)
        yield from check_laws(part(Mixer, spec, width=WIDTH, heads=HEADS, depth=2, place=place), seed)
        return
    if contract is Pattern:
        given = {key: value for key, value in spec.items() if key != "part"}
        pattern = find(Pattern, spec["part"])(**given)
        yield attempt("keeps", 0.0, lambda: keeps(pattern))
        if not pattern.fixed or first_blind_query(pattern, 23) is not None:
            return
        spec = pattern
    model = build(_recipe_with(contract, spec))
    yield from check_laws(model, seed)
    if contract is Position and find(Position, spec["part"]).relative:
        yield attempt("shift", laws.LIMIT, lambda: shift(model), seed)


def _recipe_with(contract: type, spec: Any) -> Recipe:
    """Return the recipe of a small model with the part in its slot."""
    mixer: dict[str, Any] = {"part": "attention"}
    layer: dict[str, Any] = {"mixer": mixer, "feedforward": "mlp", "wiring": "pre"}
    model: dict[str, Any] = {"kind": "decoder", "width": WIDTH, "heads": HEADS, "depth": 2, "layer": layer}
    if contract is Position:
        if find(Position, spec["part"]).embed is Position.embed:
            mixer["position"] = spec
        else:
            model["embed"] = {"part": "tokens", "position": spec}
    elif contract is Pattern:
        mixer["pattern"] = spec
        model["kind"] = "decoder" if spec.causal else "encoder"
    elif contract is Norm:
        layer["wiring"], model["norm"] = {"part": "pre", "norm": spec}, spec
    elif contract is Head:
        kind = find(Head, spec["part"])
        model |= {"head": spec, "kind": "encoder" if kind.pools or not kind.streams else "decoder"}
    elif contract is Score:
        mixer["score"] = spec
    else:
        (layer if contract is Wiring else model)[contract.__name__.lower()] = spec
    return {"vocab": VOCAB, "model": model}


def shift(model: Model, by: int = 37, time: int = 13) -> Finding:
    """Check a relative position: shifting all positions changes nothing."""
    model = model.double().eval()
    mixer = model.stack._layers[0].mixers[0]
    x = torch.randn(2, time, mixer.width, dtype=torch.float64)
    at = torch.arange(time).expand(2, -1)
    with torch.no_grad():
        original, shifted = (mixer(x, Context(positions)) for positions in (at, at + by))
    return Finding("shift", laws.max_difference(shifted, original), laws.LIMIT, f"all {time} positions shifted by {by}")


def keeps(pattern: Pattern, length: int = 40) -> Finding:
    """Check that no key is dropped that a later query may attend to, and that none comes back. The finding counts
    violations."""
    at = torch.arange(length)
    kept = pattern.keeps(at[:, None], at[None, :])  # (key, now)
    seen = pattern.mask(length).any(0).T  # (key, query)
    wanted = seen.flip(1).cumsum(1).flip(1) > 0  # by a query at this time or later
    wrong = int((wanted & ~kept & (at[:, None] <= at)).sum()) + int((kept[:, 1:] & ~kept[:, :-1]).sum())
    return Finding("keeps", float(wrong), 0.0, f"keys dropped too early, among {length} positions")
