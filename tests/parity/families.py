"""Decoders of the families that regard/convert reads: GPT-2, Llama, BLOOM, MPT, GPTBigCode."""

from collections.abc import Callable

import torch
from torch import Tensor

from regard.core import Model, watch
from regard.verify.golden import Golden
from regard.verify.laws import Finding, Subject, in_random_steps

ATTEND = "layers.{}.branches.mixer.attend.weights"


def inside(golden: Golden, model: Model, run: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits, and the intermediate outputs in the golden file: attn0, hidden1 (after the first layer),
    ..."""
    last: list[Tensor] = []
    hook = model.stack.norm.register_forward_hook(lambda module, given, y: last.append(y))
    with watch(model.stack, "layers.*") as seen:
        scores = run()
    hook.remove()
    found = {"last_hidden": last[-1]}
    for i in range(len(model.stack.layers)):
        found[f"hidden{i + 1}"] = seen[f"layers.{i}.out"][0]
        found |= {f"attn{i}": weights[0] for name, weights in seen.items() if name == ATTEND.format(i)}
    return scores, {name: value for name, value in found.items() if "out." + name in golden}


def decoder(golden: Golden) -> list[Finding]:
    """A language model of a family that regard/convert reads: outputs, gradients and steps."""
    model, tokens = golden.convert(), golden.input("input_ids")
    scores, more = inside(golden, model, lambda: model(tokens))
    findings = golden.compare({"logits": scores, **more})
    with torch.no_grad():
        lengths = torch.full((len(tokens),), tokens.shape[1])
        steps = in_random_steps(Subject(model), tokens, lengths, None, max_step=5)
    return findings + golden.compare({"logits": steps}, gradients=False)


CASES = dict.fromkeys(("gpt2", "llama", "llama_mqa", "bloom", "mpt", "mqa_bigcode"), decoder)
