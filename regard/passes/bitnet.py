"""BitNet b1.58: every weight of a linear map is -1, 0 or 1 times one number, every input a whole number of eight bits.

    w = round(W / s) within -1..1,    s = mean |W|              one s for the whole map
    q = round(127 x / m),             m = max |x|               one m for each position
    y = (q w^T) s m / 127

Learning goes straight through the rounding, as if it were not there. q w^T is a sum of whole numbers, the same in every
order, so the maps can be packed four weights to a byte once they have learned, and give the very same numbers.

Ma et al. 2024, "The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits", arXiv:2402.17764.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Norm, Pass, UserError, part, restore
from regard.core.passes import exchange
from regard.errors import nearest, short
from regard.files.paths import must_be_new
from regard.ops.dispatch import is_plain_linear
from regard.runs.folder import save_derived

LEAST = 1e-5  # of s and m, so that nothing is divided by zero
STEPS = 127  # of an input, on each side of zero
BLOCK = 1 << 20  # weights that are unpacked at a time
OUTSIDE = ("head", "head.*", "embed.*", "source_embed.*")
FORMS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Bitnet(Pass):
    """Puts such maps in the place of a model's linear layers. Tables and heads stay as they are.

    norm:   inside each map, before its input is rounded.
    keep:   names of maps that stay as they are, with * for anything; those of embeds and heads unless given.
    packed: the maps hold weights of two bits that no longer learn: what `pack` writes.
    rest:   what all other numbers of a packed model are: float32, bfloat16 or float16.
    """

    def __init__(
        self,
        norm: Norm | str | dict = "none",
        keep: list | None = None,
        packed: bool = False,
        rest: str = "float32",
    ):
        if rest not in FORMS:
            raise UserError(f"rest '{rest}' is unknown{nearest(rest, FORMS)}")
        if rest != "float32" and not packed:
            raise UserError("rest is for packed models: weights that still learn are float32")
        self.norm, self.keep, self.packed, self.rest = norm, tuple(keep or OUTSIDE), packed, rest

    def __call__(self, model: nn.Module) -> None:
        def change(path: str, module: nn.Module) -> nn.Module | None:
            if not is_plain_linear(module) or any(fnmatch(path, name) for name in self.keep):
                return None
            if self.packed:
                return PackedLinear(module.in_features, module.out_features, module.bias is not None, self.norm)
            return BitLinear.of(module, self.norm)

        if not exchange(model, change):
            raise UserError("there is no linear layer to replace: look at what 'keep' names")
        if self.packed:
            model.to(FORMS[self.rest])


class BitLinear(nn.Linear):
    """A linear map whose weights and inputs are rounded whenever it is used; its weights learn as plain ones do."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        norm: Norm | str | dict = "none",
        device: str | None = None,
    ):
        super().__init__(in_features, out_features, bias, device)
        self.norm = part(Norm, norm, width=in_features)

    @classmethod
    def of(cls, linear: nn.Linear, norm: Norm | str | dict = "none") -> BitLinear:
        """With the very weights of a plain map."""
        made = cls(linear.in_features, linear.out_features, linear.bias is not None, norm, device="meta")
        made.weight, made.bias = linear.weight, linear.bias
        return made

    def forward(self, x: Tensor) -> Tensor:
        quanta, step = rounded(self.norm(x))
        weight = self.weight.to(quanta.dtype)
        size = weight.detach().abs().mean().clamp(min=LEAST)
        exact = exactly(quanta.dtype, self.in_features)
        sums = F.linear(quanta.to(exact), Straight.apply(weight * (1 / size), 1).to(exact))  # type: ignore[no-untyped-call]
        return finished(sums, step, size, self.bias, x.dtype)

    def ternary(self) -> tuple[Tensor, Tensor]:
        """The weights -1, 0, 1 as (out, in) in int8, and their size."""
        with torch.no_grad():
            weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
            size = weight.abs().mean().clamp(min=LEAST)
            return Straight.apply(weight * (1 / size), 1).to(torch.int8), size  # type: ignore[no-untyped-call]


class PackedLinear(nn.Linear):
    """The same map with four weights in a byte. It computes as BitLinear does, and does not learn.

    packed: (ceil(out / 4), in) uint8; row r holds the rows r, r + R, r + 2 R, r + 3 R of R packed ones, lowest bits
            first, each weight plus one.
    """

    packed: Tensor

    def __init__(self, in_features: int, out_features: int, bias: bool = True, norm: Norm | str | dict = "none"):
        super(nn.Linear, self).__init__()
        self.in_features, self.out_features = in_features, out_features
        self.norm = part(Norm, norm, width=in_features)
        self.register_buffer("packed", torch.zeros(-(-out_features // 4), in_features, dtype=torch.uint8))
        self.size = nn.Parameter(torch.ones(()), requires_grad=False)
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features)) if bias else None)

    @classmethod
    def of(cls, map_: BitLinear) -> PackedLinear:
        made = cls(map_.in_features, map_.out_features, map_.bias is not None)
        made.norm, made.bias = map_.norm, map_.bias
        weights, size = map_.ternary()
        made.packed, made.size = packed(weights), nn.Parameter(size, requires_grad=False)
        return made

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """(out, in) as the map uses them, made anew each time."""
        return unpacked(self.packed, self.size.dtype).flatten(0, 1)[: self.out_features].sub(1) * self.size

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            raise UserError("packed weights do not learn: go on with the run that they were packed from")
        quanta, step = rounded(self.norm(x))
        exact = exactly(quanta.dtype, self.in_features)
        quanta = quanta.to(exact)
        sums = quanta.new_empty(*x.shape[:-1], 4, len(self.packed))
        rows = max(BLOCK // (4 * self.in_features), 1)
        for begin in range(0, len(self.packed), rows):
            some = unpacked(self.packed[begin : begin + rows], exact)  # (4, rows, in) of 0, 1, 2
            sums[..., begin : begin + rows] = F.linear(quanta, some.flatten(0, 1)).unflatten(-1, (4, -1))
        sums = sums.flatten(-2)[..., : self.out_features] - quanta.sum(-1, keepdim=True)
        return finished(sums, step, self.size, self.bias, x.dtype)


class Straight(torch.autograd.Function):
    """The nearest whole number from -most to most; backwards, as if nothing had been done."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: int) -> Tensor:
        return x.round().clamp(-most, most)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., in) as whole numbers from -127 to 127, and how many of them make 1: (..., 1). In float32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    step = STEPS / x.detach().abs().amax(-1, keepdim=True).clamp(min=LEAST)
    return Straight.apply(x * step, STEPS), step  # type: ignore[no-untyped-call]


def finished(sums: Tensor, step: Tensor, size: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """From sums of whole numbers (..., out) to what they stand for."""
    y = sums.to(step.dtype) * (size.to(step.dtype) / step)
    return (y if bias is None else y + bias).to(dtype)


def exactly(dtype: torch.dtype, terms: int) -> torch.dtype:
    """A number type in which sums of so many products, each 2 * 127 at the most, are exact in every order."""
    return torch.float64 if 2 * STEPS * terms >= 1 << 24 else dtype


def packed(weights: Tensor) -> Tensor:
    """(out, in) of -1, 0, 1 -> (ceil(out / 4), in) uint8."""
    rows = -(-len(weights) // 4)
    codes = F.pad(weights.to(torch.int8) + 1, (0, 0, 0, 4 * rows - len(weights))).to(torch.uint8)
    one, two, three, four = codes.view(4, rows, -1)
    return one | two << 2 | three << 4 | four << 6


def unpacked(some: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows, in) uint8 -> (4, rows, in) of 0, 1, 2."""
    return torch.stack([(some >> shift & 3).to(dtype) for shift in (0, 2, 4, 6)])


class Sizes(NamedTuple):
    """Bytes of a model's file."""

    before: int
    after: int


def pack(run: str | Path, out: str | Path, rest: str = "float32") -> Sizes:
    """A trained run with its ternary maps packed to two bits: a folder that predicts and evaluates as the run does.
    Its scores are the very same while the rest stays float32."""
    run, out = Path(run), Path(out)
    must_be_new(out)
    model = restore(run)
    passes = model.recipe["model"].get("passes", [])  # type: ignore[index,union-attr]
    table = next(iter(_tables(passes)), None)
    if table is None:
        raise UserError(
            f"the model in {short(run)} was not trained with the pass 'bitnet', so there is nothing to pack"
        )
    if table.get("packed"):
        raise UserError(f"the model in {short(run)} is packed already")
    changed = {**table, "packed": True, "rest": rest}
    Bitnet(**{key: value for key, value in changed.items() if key != "part"})  # refuses what it does not know
    exchange(model, lambda _, module: PackedLinear.of(module) if isinstance(module, BitLinear) else None)
    model.to(FORMS[rest])
    model.recipe["model"]["passes"] = [changed if one in ("bitnet", table) else one for one in passes]  # type: ignore
    save_derived(model, run, out)
    return Sizes(*((folder / "model.safetensors").stat().st_size for folder in (run, out)))


def _tables(passes: list) -> Iterator[dict[str, Any]]:
    for one in passes:
        table = {"part": one} if isinstance(one, str) else one
        if table["part"] == "bitnet":
            yield table
