"""Mixture of experts: a router sends each position to a few of many feed-forwards, so that the number of parameters
grows and the work per position does not.

    r = R x,    T = the k largest of r,    y = sum over i in T of  softmax_T(r)_i  f_i(x)

No token is dropped when many choose the same expert, so the output of a position depends on itself alone. Two auxiliary
losses over the valid positions balance the load of the experts, where f_i is the share of choices that fell on expert i
and p_i its mean probability, and keep the router's logits small:

    balance * n * sum over experts of f_i p_i        z * mean of (log sum exp r)^2

Shazeer et al. 2017, arXiv:1701.06538; one expert and the balance loss: Fedus et al. 2021, "Switch Transformers",
arXiv:2101.03961; the z loss: Zoph et al. 2022, "ST-MoE", arXiv:2202.08906.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from regard.core import Context, Cost, Mixer, Pointwise, Tap, UserError, part

WEIGH = ("chosen", "all")


class Experts(Pointwise):
    """experts: number of experts.
    top:        number of experts per position.
    expert:     any pointwise feed-forward: "mlp", "glu", { part = "glu", hidden = 64 }, ...
    weigh:      softmax over the "chosen" experts, or over "all", which with top = 1 trains the router (Switch).
    balance:    weight of the load-balancing loss, which is 1 at uniform load; it passes through the tap `loss`.
    z:          weight of the router z loss; ST-MoE has 0.001.
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
        if weigh not in WEIGH:
            raise UserError(f"weigh must be 'chosen' or 'all', not '{weigh}'")
        if top == 1 and weigh == "chosen":
            raise UserError(
                "with top = 1 the chosen expert always has weight 1 and the router learns nothing: set weigh = 'all'"
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
            raise UserError("an expert must be a pointwise feed-forward that keeps the width")
        self.loss = Tap()

    def forward(self, x: Tensor, context: Context) -> Tensor:
        valid = slice(None) if context.valid is None else context.valid.flatten()
        flat = x.flatten(0, 1)
        y = self.route(flat[valid])
        if context.valid is not None:
            y = y.new_zeros(flat.shape).masked_scatter(valid[:, None], y)
        return y.view_as(x)

    def route(self, x: Tensor) -> Tensor:
        """Return the output for x (positions, width), all of them valid."""
        logits = self.router(x)  # (positions, experts)
        best, chosen = logits.topk(self.top, -1)  # (positions, top)
        weights = best.softmax(-1) if self.weigh == "chosen" else logits.softmax(-1).gather(1, chosen)
        order = chosen.flatten().argsort(stable=True)  # sorts all choices by expert
        counts = chosen.flatten().bincount(minlength=len(self.experts))
        inputs = x[order // self.top].split(counts.tolist())  # per expert, (choices, width)
        outputs = [
            expert(some[None], Context.begin(1, len(some), x.device))[0] if len(some) else some
            for expert, some in zip(self.experts, inputs, strict=True)
        ]
        y = torch.cat(outputs)[order.argsort()].unflatten(0, (-1, self.top))  # (positions, top, width)
        if self.loss.watched:
            self.loss(self.auxiliary_loss(logits, counts))
        return (y * weights[..., None]).sum(1)

    def auxiliary_loss(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Return the sum of the two losses, from the router's logits (positions, experts) and the load of each
        expert."""
        positions = max(len(logits), 1)
        mean = logits.softmax(-1).sum(0) / positions
        load = len(self.experts) * (counts.to(mean.dtype) / (positions * self.top) * mean).sum()
        return self.balance * load + self.z * logits.logsumexp(-1).square().sum() / positions

    def cost(self, length: int, past: int = 0) -> Cost:
        one = self.experts[0].cost(length)  # type: ignore[operator]
        return Cost(2 * length * self.router.weight.numel() + self.top * one.flops, 0)

    def value_path(self) -> Iterator[Tensor]:
        for expert in self.experts:
            yield from expert.value_path()  # type: ignore[operator]
