"""BitNet b1.58: the weights of a linear layer are -1, 0 or 1 times one scale, and its inputs are 8-bit integers times a
scale per position.

    w = round(W / s) within -1..1,    s = mean |W|              one s per layer
    q = round(127 x / m),             m = max |x|               one m per position
    y = (q w^T) s m / 127

Gradients pass straight through the rounding. q w^T is a sum of integers, which is exact in every order, so a trained
layer can be packed to four weights per byte and gives exactly the same outputs.

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

from regard.bases.replace import replace_modules
from regard.core import Norm, Pass, UserError, part, restore
from regard.errors import nearest, short
from regard.files.paths import must_be_new
from regard.ops.dispatch import is_plain_linear
from regard.runs.folder import save_derived

EPS = 1e-5  # smallest s and m, against division by zero
QMAX = 127  # largest quantized input
UNPACK_BLOCK = 1 << 20  # weights that are unpacked at a time
DEFAULT_KEEP = ("head", "head.*", "embed.*", "source_embed.*")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Bitnet(Pass):
    """Replaces the linear layers of a model by ternary ones. Embedding tables and heads stay as they are.

    norm:   norm inside each layer, before its input is quantized.
    keep:   names of linear layers that are not replaced, with * as wildcard; those of embeds and heads by default.
    packed: the layers hold 2-bit weights that can no longer be trained: what `pack` writes.
    rest:   dtype of all other tensors of a packed model: float32, bfloat16 or float16.
    """

    def __init__(
        self,
        norm: Norm | str | dict = "none",
        keep: list | None = None,
        packed: bool = False,
        rest: str = "float32",
    ):
        if rest not in DTYPES:
            raise UserError(f"rest '{rest}' is unknown{nearest(rest, DTYPES)}")
        if rest != "float32" and not packed:
            raise UserError("rest is for packed models: trainable weights are float32")
        self.norm, self.keep, self.packed, self.rest = norm, tuple(keep or DEFAULT_KEEP), packed, rest

    def __call__(self, model: nn.Module) -> None:
        def change(path: str, module: nn.Module) -> nn.Module | None:
            if not is_plain_linear(module) or any(fnmatch(path, name) for name in self.keep):
                return None
            if self.packed:
                return PackedLinear(module.in_features, module.out_features, module.bias is not None, self.norm)
            return BitLinear.from_linear(module, self.norm)

        if not replace_modules(model, change):
            raise UserError("there is no linear layer to replace: check the names in 'keep'")
        if self.packed:
            model.to(DTYPES[self.rest])


class BitLinear(nn.Linear):
    """A linear layer that quantizes its weights and inputs in every forward pass; the full-precision weights are
    trained."""

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
    def from_linear(cls, linear: nn.Linear, norm: Norm | str | dict = "none") -> BitLinear:
        """Return a BitLinear that shares the parameters of a linear layer."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, norm, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer

    def forward(self, x: Tensor) -> Tensor:
        quantized, factor = quantize_input(self.norm(x))
        weight = self.weight.to(quantized.dtype)
        size = weight.detach().abs().mean().clamp(min=EPS)
        exact = exact_dtype(quantized.dtype, self.in_features)
        sums = F.linear(quantized.to(exact), RoundSTE.apply(weight * (1 / size), 1).to(exact))  # type: ignore[no-untyped-call]
        return dequantize(sums, factor, size, self.bias, x.dtype)

    def ternary(self) -> tuple[Tensor, Tensor]:
        """Return the weights -1, 0, 1 (out, in) in int8, and their scale."""
        with torch.no_grad():
            weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
            size = weight.abs().mean().clamp(min=EPS)
            return RoundSTE.apply(weight * (1 / size), 1).to(torch.int8), size  # type: ignore[no-untyped-call]


class PackedLinear(nn.Linear):
    """A BitLinear with four weights per byte, for inference only.

    packed: (ceil(out / 4), in) uint8; row r of R holds rows r, r + R, r + 2 R, r + 3 R of the weights plus one, lowest
            bits first.
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
    def from_bit_linear(cls, source: BitLinear) -> PackedLinear:
        layer = cls(source.in_features, source.out_features, source.bias is not None)
        layer.norm, layer.bias = source.norm, source.bias
        weights, size = source.ternary()
        layer.packed, layer.size = pack_ternary(weights), nn.Parameter(size, requires_grad=False)
        return layer

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The unpacked weights (out, in), computed on each access."""
        return unpack_ternary(self.packed, self.size.dtype).flatten(0, 1)[: self.out_features].sub(1) * self.size

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            raise UserError("packed weights cannot be trained: continue the run that they were packed from")
        quantized, factor = quantize_input(self.norm(x))
        exact = exact_dtype(quantized.dtype, self.in_features)
        quantized = quantized.to(exact)
        sums = quantized.new_empty(*x.shape[:-1], 4, len(self.packed))
        rows = max(UNPACK_BLOCK // (4 * self.in_features), 1)
        for begin in range(0, len(self.packed), rows):
            block = unpack_ternary(self.packed[begin : begin + rows], exact)  # (4, rows, in) of 0, 1, 2
            sums[..., begin : begin + rows] = F.linear(quantized, block.flatten(0, 1)).unflatten(-1, (4, -1))
        sums = sums.flatten(-2)[..., : self.out_features] - quantized.sum(-1, keepdim=True)
        return dequantize(sums, factor, self.size, self.bias, x.dtype)


class RoundSTE(torch.autograd.Function):
    """Round to the nearest integer from -limit to limit, with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: int) -> Tensor:
        return x.round().clamp(-limit, limit)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def quantize_input(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x (..., in) quantized to integers from -127 to 127, and the factor (..., 1), in float32 or better."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    factor = QMAX / x.detach().abs().amax(-1, keepdim=True).clamp(min=EPS)
    return RoundSTE.apply(x * factor, QMAX), factor  # type: ignore[no-untyped-call]


def dequantize(sums: Tensor, factor: Tensor, size: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the outputs from integer sums (..., out)."""
    y = sums.to(factor.dtype) * (size.to(factor.dtype) / factor)
    return (y if bias is None else y + bias).to(dtype)


def exact_dtype(dtype: torch.dtype, terms: int) -> torch.dtype:
    """Return a dtype in which sums of so many products, each at most 2 * 127, are exact in every order."""
    return torch.float64 if 2 * QMAX * terms >= 1 << 24 else dtype


def pack_ternary(weights: Tensor) -> Tensor:
    """Pack weights -1, 0, 1 (out, in) to uint8 (ceil(out / 4), in)."""
    rows = -(-len(weights) // 4)
    codes = F.pad(weights.to(torch.int8) + 1, (0, 0, 0, 4 * rows - len(weights))).to(torch.uint8)
    one, two, three, four = codes.view(4, rows, -1)
    return one | two << 2 | three << 4 | four << 6


def unpack_ternary(block: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack uint8 (rows, in) to 0, 1, 2 in `dtype`, (4, rows, in)."""
    return torch.stack([(block >> shift & 3).to(dtype) for shift in (0, 2, 4, 6)])


class Sizes(NamedTuple):
    """Sizes of the model file in bytes."""

    before: int
    after: int


def pack(run: str | Path, out: str | Path, rest: str = "float32") -> Sizes:
    """Write a copy of a trained run with its ternary layers packed to two bits. With rest = "float32" its outputs are
    exactly the same."""
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
    Bitnet(**{key: value for key, value in changed.items() if key != "part"})  # refuses invalid arguments
    replace_modules(
        model, lambda _, module: PackedLinear.from_bit_linear(module) if isinstance(module, BitLinear) else None
    )
    model.to(DTYPES[rest])
    model.recipe["model"]["passes"] = [changed if one in ("bitnet", table) else one for one in passes]  # type: ignore
    save_derived(model, run, out)
    return Sizes(*((folder / "model.safetensors").stat().st_size for folder in (run, out)))


def _tables(passes: list) -> Iterator[dict[str, Any]]:
    for one in passes:
        table = {"part": one} if isinstance(one, str) else one
        if table["part"] == "bitnet":
            yield table
