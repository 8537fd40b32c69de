"""What a white-box layer does to its vectors: how many nats it takes to code them, and how sparse they become.

    R(Z)    = 1/2 logdet(I + d / (n e^2) Z^T Z)                                of the vectors as they are
    R(Z; U) = 1/2 sum over k of logdet(I + p / (n e^2) (Z U_k)^T (Z U_k))      in the layer's subspaces, of dim p
    sparse rate reduction: R(Z) - R(Z; U) - l |Z|_0, which every layer should raise

Z is (n, d): the vectors of one sequence. Yu et al. 2023, "White-Box Transformers via Sparse Rate Reduction",
arXiv:2306.01129, measures R(Z; U) after the subspace attention and |Z|_0 after the sparse coding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.core import Layer, Model, UserError, watch


class Reading(NamedTuple):
    """Of one layer, means over the sequences of a batch."""

    whole: float  # R(Z) after compression
    inside: float  # R(Z; U) after compression
    filled: float  # the share of entries that are not 0, after sparse coding


def read(
    model: Model, tokens: Tensor, valid: Tensor | None = None, epsilon: float = 0.5, **known: Any
) -> list[Reading]:
    """One reading for each layer that has subspaces (a mixer with `codes`) and wiring "crate", the lowest first.

    epsilon: how exactly the vectors are coded. known: what else the model's forward takes.
    """
    if epsilon <= 0:
        raise UserError(f"epsilon must be above 0, not {epsilon}")
    with torch.no_grad(), watch(model, "*.wiring.between") as between, watch(model, "*.out") as out:
        model(tokens, valid=valid, **known)
    readings = []
    for path, (half, *_) in between.items():
        layer = model.get_submodule(path.removesuffix(".wiring.between"))
        assert isinstance(layer, Layer)
        codes = [mixer.codes(half) for mixer in layer.mixers if hasattr(mixer, "codes")]
        if codes:
            after = out[path.removesuffix("wiring.between") + "out"][0]
            readings.append(_reading(half, torch.cat(codes, 1), after, valid, epsilon))
    if not readings:
        raise UserError(
            "this model has no layer with subspaces: take recipe 'crate', or mixer 'subspace' in such a layer"
        )
    return readings


def rate(z: Tensor, valid: Tensor | None = None, epsilon: float = 0.5) -> Tensor:
    """R(Z) of each sequence: z (batch, ..., n, d), valid (batch, n) -> (batch, ...)"""
    z = z.double()
    count = torch.full(z.shape[:1], z.shape[-2], device=z.device)
    if valid is not None:
        z = z.masked_fill(~valid.view(len(z), *[1] * (z.dim() - 3), -1, 1), 0.0)
        count = valid.sum(1)
    scale = z.shape[-1] / (count.clamp(min=1) * epsilon**2)
    gram = z.mT @ z * scale.view(-1, *[1] * (z.dim() - 1))
    return 0.5 * torch.logdet(gram + torch.eye(z.shape[-1], dtype=z.dtype, device=z.device))


def _reading(half: Tensor, codes: Tensor, after: Tensor, valid: Tensor | None, epsilon: float) -> Reading:
    """half and after (batch, n, width), codes (batch, subspaces, n, dim)"""
    with torch.no_grad():
        whole, inside = rate(half, valid, epsilon).mean(), rate(codes, valid, epsilon).sum(1).mean()
        filled = (after if valid is None else after[valid]).ne(0).double().mean()
    return Reading(float(whole), float(inside), float(filled))
