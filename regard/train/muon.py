"""Muon: update a matrix by its orthogonalized momentum. Jordan et al. 2024, with the step size of Liu et al. 2025,
arXiv:2502.16982.

The updates are those of torch.optim.Muon. That one computes in bfloat16, which few CPUs support, and one matrix at a
time; this one computes in float32, on the Gram matrix of the shorter side, and batches matrices of equal shorter side,
which on a CPU is fifteen times faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315  # coefficients of the Newton-Schulz polynomial, which moves singular values to one
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Muon for parameters that are matrices. The `lr` is scaled so that updates are about as large as AdamW's."""

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_size: dict[tuple[int, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                parameters, updates = by_size.setdefault((min(parameter.shape), parameter.device), ([], []))
                parameters.append(parameter)
                updates.append(parameter.grad.lerp(momentum, group["momentum"]))  # Nesterov
            for parameters, updates in by_size.values():
                for parameter, update in zip(parameters, orthogonalize(updates), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-0.2 * math.sqrt(max(parameter.shape)) * group["lr"])


def orthogonalize(matrices: list[Tensor]) -> list[Tensor]:
    """Return each matrix with its singular values moved close to one. The shorter sides must all be equally long."""
    wide = [(one if one.size(0) <= one.size(1) else one.T).float() for one in matrices]
    wide = [one / one.norm().clamp(min=1e-7) for one in wide]
    gram = torch.stack([one @ one.T for one in wide])
    product: Tensor | None = None  # of the factors of all iterations
    for remaining in reversed(range(ITERATIONS)):
        factor = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
        factor.diagonal(dim1=-2, dim2=-1).add_(A)
        product = factor if product is None else factor @ product
        if remaining:
            gram = factor @ gram @ factor
    assert product is not None
    results = [left @ matrix for left, matrix in zip(product, wide, strict=True)]
    return [one if one.shape == matrix.shape else one.T for one, matrix in zip(results, matrices, strict=True)]
