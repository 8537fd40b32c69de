"""Mixture of experts: many feed-forwards, of which each position asks only the few that its router likes best, so
that parameters grow and the work does not.

    r = R x,    T = the k largest of r,    y = sum over i in T of  softmax_T(r)_i  f_i(x)

Nothing is dropped when many want the same expert, so that a position's output depends on itself alone. Experts are kept
busy by a loss with f_i the share of choices that fell on expert i, and p_i its mean probability, and the router's
numbers are kept small by another, both over real positions only:

    balance * n * sum over experts of f_i p_i        z * mean of (log sum exp r)^2

Shazeer et al. 2017, arXiv:1701.06538; one expert and the loss: Fedus et al. 2021, "Switch Transformers",
arXiv:2101.03961; the second loss: Zoph et al. 2022, "ST-MoE", arXiv:2202.08906.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from regard.core import Context, Cost, Mixer, Pointwise, Tap, UserError, part

WEIGHTS = ("chosen", "all")


class Experts(Pointwise):
    """experts: how many there are.
    top:        how many of them a position asks.
    expert:     any feed-forward that treats positions alone: "mlp", "glu", { part = "glu", hidden = 64 }, ...
    weigh:      softmax over the "chosen", or over "all" experts, which with top = 1 teaches the router (Switch).
    balance:    of the loss for even use, which is 1 when all are used alike; it passes the tap `loss`.
    z:          of the loss for small router numbers; ST-MoE takes 0.001.
    """

    examples = (
        {"experts": 4, "expert": {"part": "mlp", "hidden": 10}},
        {"experts": 5, "top": 1, "weigh": "all", "expert": "glu"},
        {"experts": 3, "top": 3, "expert": {"part": "mlp", "hidden": 7, "norm": "layer"}, "z": 0.001},
    )

    def __init__(
        self,
        width: int,
        experts: int = 8,
        top: int = 2,
        expert: str | dict = "mlp",
        weigh: str = "chosen",
        balance: float = 0.01,
        z: float = 0.0,
    ):
        super().__init__()
        if not 1 <= top <= experts:
            raise UserError(f"top must lie between 1 and the number of experts, {experts}, not {top}")
        if weigh not in WEIGHTS:
            raise UserError(f"weigh must be 'chosen' or 'all', not '{weigh}'")
        if top == 1 and weigh == "chosen":
            raise UserError(
                "with top = 1 the chosen expert always weighs 1 and the router learns nothing: weigh = 'all'"
            )
        if not isinstance(expert, str | dict):
            raise UserError("expert must be a name or a table, so that every expert gets weights of its own")
        self.width, self.top, self.weigh, self.balance, self.z = width, top, weigh, balance, z
        self.router = nn.Linear(width, experts, bias=False)
        try:
            self.experts = nn.ModuleList(part(Mixer, expert, width=width) for _ in range(experts))
        except UserError as error:
            raise UserError(error.message, ("expert", *error.path[1:])) from error.__cause__
        if not isinstance(self.experts[0], Pointwise) or self.experts[0].out_width != width:
            raise UserError("an expert must be a feed-forward that treats every position alone and keeps the width")
        self.loss = Tap()

    def forward(self, x: Tensor, context: Context) -> Tensor:
        real = slice(None) if context.valid is None else context.valid.flatten()
        flat = x.flatten(0, 1)
        y = self.ask(flat[real])
        if context.valid is not None:
            y = y.new_zeros(flat.shape).masked_scatter(real[:, None], y)
        return y.view_as(x)

    def ask(self, x: Tensor) -> Tensor:
        """x (positions, width), all of them real."""
        scores = self.router(x)  # (positions, experts)
        best, chosen = scores.topk(self.top, -1)  # (positions, top)
        share = best.softmax(-1) if self.weigh == "chosen" else scores.softmax(-1).gather(1, chosen)
        order = chosen.flatten().argsort(stable=True)  # of all choices, by expert
        counts = chosen.flatten().bincount(minlength=len(self.experts))
        asked = x[order // self.top].split(counts.tolist())  # for each expert, (its choices, width)
        told = [
            expert(some[None], Context.begin(1, len(some), x.device))[0] if len(some) else some
            for expert, some in zip(self.experts, asked, strict=True)
        ]
        y = torch.cat(told)[order.argsort()].unflatten(0, (-1, self.top))  # (positions, top, width)
        if self.loss.watched:
            self.loss(self.cares(scores, counts))
        return (y * share[..., None]).sum(1)

    def cares(self, scores: Tensor, counts: Tensor) -> Tensor:
        """The two losses, from scores (positions, experts) and the choices that fell on each expert."""
        positions = max(len(scores), 1)
        mean = scores.softmax(-1).sum(0) / positions
        even = len(self.experts) * (counts.to(mean.dtype) / (positions * self.top) * mean).sum()
        return self.balance * even + self.z * scores.logsumexp(-1).square().sum() / positions

    def cost(self, length: int, past: int = 0) -> Cost:
        one = self.experts[0].cost(length)  # type: ignore[operator]
        return Cost(2 * length * self.router.weight.numel() + self.top * one.flops, 0)

    def value_path(self) -> Iterator[Tensor]:
        for expert in self.experts:
            yield from expert.value_path()  # type: ignore[operator]
