"""Int8 linear layers for decoding with a trained model: a quarter of the memory to read, which limits decoding on a
CPU.

    w = round(127 W / max |W|)      one maximum for each output
    q = round(63 x / max |x|)       one maximum for each position, so that no position depends on another
    y = (q w^T) max |W| max |x| / (127 * 63) + b

Integer sums are exact, so the output does not depend on how a sequence is cut. Inputs have seven bits, not eight,
because CPUs that add pairs of products in 16 bits would overflow with eight.
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor, nn

from regard.bases.replace import replace_modules
from regard.core import Context, Head, Model, Position, UserError
from regard.native.decode import apply, linear_params
from regard.native.structs import LinearParams
from regard.ops.dispatch import FEW_ROWS, inference_kernels, is_few_rows, is_plain_linear
from regard.ops.linear import flatten_rows

QUANTIZED_LINEAR = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
STEPS = 63  # largest absolute value of a quantized input
LEAST = 1e-12


class Int8Linear(nn.Linear):
    """A linear layer with int8 weights. It cannot be trained."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super(nn.Linear, self).__init__()
        self.out_features, self.in_features = weight.shape
        weight = weight.detach().float()
        self.scale = nn.Parameter(weight.abs().amax(1).clamp(min=LEAST) / 127, requires_grad=False)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch announces another API for quantized weights
            zero = torch.zeros(self.out_features, dtype=torch.long)
            held = torch.quantize_per_channel(weight, self.scale.double(), zero, 0, torch.qint8)
            self.held = torch.ops.quantized.linear_prepack(held, None)
        self.whole, self.steps = (
            held.int_repr(),
            self.scale.detach().clone(),
        )  # the same weights for the kernel for few rows
        self.sums = self.whole.sum(1, dtype=torch.int32)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantized weight (out, in), computed at every access."""
        return torch.ops.quantized.linear_unpack(self.held)[0].dequantize().to(self.scale.dtype)

    def params(self) -> LinearParams:
        """Return the layer as a struct for the kernels."""
        return linear_params(self.whole, self._parameters["bias"], None, self.steps, self.sums)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        unless = "" if is_few_rows(x) else f"more than {FEW_ROWS} rows, for which torch's packed product is faster"
        if (kernels := inference_kernels(x, self.bias, op="int8 linear", unless=unless)) is not None:
            return apply(kernels, self.params(), flatten_rows(x)).view(*x.shape[:-1], self.out_features)
        most = torch.linalg.vector_norm(rows, math.inf, -1, keepdim=True).clamp_(min=LEAST)
        y = QUANTIZED_LINEAR((rows / most).float(), 1 / STEPS, STEPS + 1, self.held).to(x.dtype)
        y = y.mul_(most) if self.bias is None else torch.addcmul(self.bias, y, most)
        return y.view(*x.shape[:-1], self.out_features)


class Int8Head(Head):
    """A head whose product with its table is an Int8Linear."""

    def __init__(self, inner: Head, table: Tensor, bias: Tensor | None):
        super().__init__()
        self.inner, self.map = inner, Int8Linear(table, bias)
        self.pools, self.streams = inner.pools, inner.streams

    def forward(self, x: Tensor, context: Context) -> Tensor:
        found = self.inner.linear(x, context)
        assert found is not None
        return self.map(found[0])

    def flops(self, length: int) -> int:
        return self.inner.flops(length)


@torch.no_grad()
def quantize(model: Model) -> Model:
    """Replace the linear layers, and the head where it is a product with a table, by int8 ones in place, and return the
    model; for decoding on a CPU."""
    if not isinstance(model, Model):
        raise UserError("int8 is for models with one stack of layers at the end, not for two towers")
    device = next(model.parameters()).device
    if device.type != "cpu" or next(model.parameters()).dtype != torch.float32:
        raise UserError(f"int8 is for float32 models on a cpu, and this one is on {device}: leave one of them out")
    model.eval()

    # Linear layers of positions stay: their weights are also used as matrices, and both ways must give the same.
    kept = {m for position in model.modules() if isinstance(position, Position) for m in position.modules()}

    def change(path: str, module: nn.Module) -> nn.Module | None:
        if not is_plain_linear(module) or module in kept or path.partition(".")[0] == "head":
            return None
        return Int8Linear(module.weight, module.bias)

    replace_modules(model, change)
    x, context = torch.zeros(1, 1, model.stack.width), Context.begin(1, 1)
    linear = None if model.head.pools else model.head.linear(x, context)
    if linear is not None:
        model.head = Int8Head(model.head, linear[1], linear[2])
    return model
