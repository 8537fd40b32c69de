"""Measurements of white-box (CRATE) layers: the coding rate of their vectors in nats, and their sparsity.

    R(Z)    = 1/2 logdet(I + d / (n e^2) Z^T Z)                                of the vectors themselves
    R(Z; U) = 1/2 sum over k of logdet(I + p / (n e^2) (Z U_k)^T (Z U_k))      in the layer's subspaces, of dim p
    sparse rate reduction: R(Z) - R(Z; U) - l |Z|_0, which every layer should increase

Z is (n, d): the vectors of one sequence. Yu et al. 2023, "White-Box Transformers via Sparse Rate Reduction",
arXiv:2306.01129, measures R(Z; U) after the subspace attention and |Z|_0 after the sparse coding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.core import Layer, Model, UserError, watch


class LayerRates(NamedTuple):
    """Measurements of one layer, averaged over the sequences of a batch."""

    vector_rate: float  # R(Z) after compression
    subspace_rate: float  # R(Z; U) after compression
    density: float  # share of nonzero entries after sparse coding


def layer_rates(
    model: Model, tokens: Tensor, valid: Tensor | None = None, epsilon: float = 0.5, **inputs: Any
) -> list[LayerRates]:
    """Return the rates of each layer with subspaces (a mixer with `codes`) and wiring "crate", the lowest first.

    epsilon: the coding precision. inputs: other arguments of the model's forward.
    """
    if epsilon <= 0:
        raise UserError(f"epsilon must be above 0, not {epsilon}")
    with torch.no_grad(), watch(model, "*.wiring.between") as between, watch(model, "*.out") as out:
        model(tokens, valid=valid, **inputs)
    rates = []
    for path, (half, *_) in between.items():
        layer = model.get_submodule(path.removesuffix(".wiring.between"))
        assert isinstance(layer, Layer)
        codes = [mixer.codes(half) for mixer in layer.mixers if hasattr(mixer, "codes")]
        if codes:
            after = out[path.removesuffix("wiring.between") + "out"][0]
            rates.append(_layer_rates(half, torch.cat(codes, 1), after, valid, epsilon))
    if not rates:
        raise UserError(
            "this model has no layer with subspaces: use the recipe 'crate', or the mixer 'subspace' and wiring 'crate'"
        )
    return rates


def rate(z: Tensor, valid: Tensor | None = None, epsilon: float = 0.5) -> Tensor:
    """Return R(Z) of each sequence, (batch, ...), from z (batch, ..., n, d) and valid (batch, n)."""
    z = z.double()
    count = torch.full(z.shape[:1], z.shape[-2], device=z.device)
    if valid is not None:
        z = z.masked_fill(~valid.view(len(z), *[1] * (z.dim() - 3), -1, 1), 0.0)
        count = valid.sum(1)
    scale = z.shape[-1] / (count.clamp(min=1) * epsilon**2)
    gram = z.mT @ z * scale.view(-1, *[1] * (z.dim() - 1))
    return 0.5 * torch.logdet(gram + torch.eye(z.shape[-1], dtype=z.dtype, device=z.device))


def _layer_rates(half: Tensor, codes: Tensor, after: Tensor, valid: Tensor | None, epsilon: float) -> LayerRates:
    """Return the rates of a layer from `half` and `after` (batch, n, width), and codes (batch, subspaces, n, dim)."""
    with torch.no_grad():
        vector_rate, subspace_rate = rate(half, valid, epsilon).mean(), rate(codes, valid, epsilon).sum(1).mean()
        density = (after if valid is None else after[valid]).ne(0).double().mean()
    return LayerRates(float(vector_rate), float(subspace_rate), float(density))
