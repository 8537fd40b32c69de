"""Export a module as an ONNX graph, and compare it with the module in onnxruntime."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

from regard.bases.attend import Attend
from regard.core import Model
from regard.schema import name_of

SIZES = ((1, 1), (3, 9), (2, 70), (1, 300))  # (batch, length) at which a graph is compared with the model
MAX_INLINE_BYTES = 1 << 30  # weights up to this size are in the graph's file, which must stay below 2 GB
TOLERANCE = 1e-3  # times the largest logit, or 1
# Where the model itself rounds, as BitNet does, the last bit of a sum can matter: twelve layers differ by a fiftieth.
QUANTIZED_TOLERANCE = 0.1  # times the norm of a position's logits
MAX_ARGMAX_DIFFERENCES = 0.2  # share of the positions whose argmax may differ


class Tensors(NamedTuple):
    """Inputs or outputs of a graph."""

    names: list[str]
    axes: list[dict[int, str]]  # dynamic axes of each


def export_graph(module: nn.Module, given: tuple, inputs: Tensors, outputs: list[str], path: Path) -> Any:
    """Write the graph of a module and return an onnxruntime session of it."""
    module(*given)  # so that cached constants are real tensors, not symbols of the trace
    axes = iter(inputs.axes)

    def dynamic(value: Any) -> Any:
        if isinstance(value, list):
            return [dynamic(one) for one in value]
        return dict.fromkeys(next(axes), torch.export.Dim.DYNAMIC)

    with _silence():
        program = torch.export.export(module, given, dynamic_shapes=tuple(map(dynamic, given)), strict=False)
        size = sum(one.numel() * one.element_size() for one in module.parameters())
        made = torch.onnx.export(
            program, (), input_names=inputs.names, output_names=outputs, dynamic_shapes=tuple(inputs.axes), dynamo=True,
            verbose=False,
        )  # fmt: skip
        assert made is not None
        for value in {one for node in made.model.graph for one in node.outputs} - set(made.model.graph.outputs):
            value.shape = None  # the one seen while tracing, which need not hold for other sizes
        made.save(str(path), external_data=size > MAX_INLINE_BYTES)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # log no errors: they are raised
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_graph(session: Any, given: dict[str, Any]) -> dict[str, np.ndarray]:
    """Run a graph on those of the named tensors that it takes, and return its outputs by name."""
    wanted = {one.name: np.ascontiguousarray(given[one.name]) for one in session.get_inputs()}
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, session.run(names, wanted), strict=True))


def compare(found: Tensor, expected: Tensor, model: Model) -> None:
    """Refuse a graph whose logits (..., vocab) differ from those of the model."""
    most = float((found - expected).abs().max())
    if any(name_of(module) == "bitnet" for module in model.modules()):
        share = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        close = float(share.max()) <= QUANTIZED_TOLERANCE
        others, count = int((found.argmax(-1) != expected.argmax(-1)).sum()), share.numel()
        if close and others > max(MAX_ARGMAX_DIFFERENCES * count, 1):
            raise ValueError(f"the graph and the model differ in the argmax of {others} of {count} positions")
    else:
        close = most <= TOLERANCE * max(1.0, float(expected.abs().max()))
    if not close:
        raise ValueError(f"the graph and the model differ by {most:.2g}")


def padded_mask(batch: int, length: int) -> Tensor:
    """Return the attention mask of rows of different lengths, padded on the right: (batch, length)."""
    lengths = torch.tensor([length, *(max(length - 2 * row - 1, 1) for row in range(batch - 1))])
    return (torch.arange(length) < lengths[:, None]).long()


def sizes(limit: int | None) -> list[tuple[int, int]]:
    return sorted({(batch, min(length, limit or length)) for batch, length in SIZES})


@contextlib.contextmanager
def plain_attention(model: nn.Module) -> Iterator[None]:
    """Inside the `with` block, attention uses the reference kernel, whose control flow does not depend on values."""
    attends = [module for module in model.modules() if isinstance(module, Attend)]
    before = [attend.kernel for attend in attends]
    for attend in attends:
        attend.kernel = "reference"
    try:
        yield
    finally:
        for attend, kernel in zip(attends, before, strict=True):
            attend.kernel = kernel


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Inside the `with` block, suppress torch's logs, warnings and prints about exporting."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(io.StringIO()):
                yield
    finally:
        logging.disable(before)
