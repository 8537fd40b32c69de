"""Power normalisation: the authors' MaskPowerNorm, training steps one after the other and then eval."""

import torch

from regard.core import Norm, part
from regard.verify.golden import Golden
from regard.verify.laws import Finding


def powernorm(golden: Golden) -> list[Finding]:
    c = golden.config
    norm = part(
        Norm,
        {
            "part": "power",
            "eps": c["eps"],
            "forward_decay": c["alpha_fwd"],
            "backward_decay": c["alpha_bkw"],
            "warmup": c["warmup_iters"],
            "groups": c["group_num"],
            "gradient": "authors",  # the golden's gradients depart from the paper's, as the class says
        },
        width=c["num_features"],
    )
    names = {
        "weight": "weight",
        "bias": "bias",
        "square": lambda w: w("running_phi").flatten(),
        "along": lambda w: w("ema_gz").flatten(),
        "steps": lambda w: w("iters")[0],
    }
    golden.load(norm, names)
    valid = ~golden.input("pad_mask")
    seen: dict[str, list] = {}
    for x, cotangent in zip(golden.input("x"), golden.input("cot"), strict=True):
        x = x.transpose(0, 1).detach().requires_grad_()  # time-major in the original
        y = norm(x, valid)
        norm.zero_grad()
        y.backward(cotangent.transpose(0, 1))
        step = {
            "train_out": y.detach().transpose(0, 1),
            "running_phi": norm.square.clone(),
            "ema_gz": norm.along.clone(),
            "grad_x": x.grad.transpose(0, 1),
            "grad_weight": norm.weight.grad.clone(),
            "grad_bias": norm.bias.grad.clone(),
        }
        for name, value in step.items():
            seen.setdefault(name, []).append(value)
    outputs = {name: torch.stack(values) for name, values in seen.items()}
    with torch.no_grad():
        outputs["eval_out"] = norm.eval()(golden.input("x")[0].transpose(0, 1), valid).transpose(0, 1)
    return golden.compare(outputs)


CASES = {"powernorm": powernorm}
