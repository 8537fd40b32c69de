"""Whisper: sound in, text out."""

import torch

from regard.core import Memory
from regard.verify.golden import Golden
from regard.verify.laws import Finding, Subject, in_random_steps


def whisper(golden: Golden) -> list[Finding]:
    model = golden.convert()
    model.source_embed.position.table.requires_grad_()  # fixed in training, but the golden has its gradient
    frames, tokens = golden.input("input_features").mT, golden.input("decoder_input_ids")
    memory = model.encode(frames)
    findings = golden.compare({"encoder_last_hidden": memory.x, "logits": model(tokens, memory=memory)})
    with torch.no_grad():
        lengths = torch.full((len(tokens),), tokens.shape[1])
        steps = in_random_steps(Subject(model), tokens, lengths, Memory(memory.x.detach().double()), max_step=5)
    return findings + golden.compare({"logits": steps}, gradients=False)


CASES = {"whisper": whisper}
