"""Encoder-decoders that regard/convert reads, by their family's own rules: T5 v1.0 and v1.1, Marian."""

import torch

from regard.core import Model
from regard.verify.golden import Golden
from regard.verify.laws import Finding, Subject, in_random_steps


def encoder_decoder(golden: Golden) -> list[Finding]:
    return compared(golden, golden.convert())


def marian(golden: Golden) -> list[Finding]:
    """There the bias of the scores is a buffer, and the padding token's vector learns from the output alone."""
    model = golden.convert()
    model.head.bias.requires_grad_(False)
    for embed in (model.source_embed, model.embed):
        embed.register_forward_hook(
            lambda _, given, x: torch.where((given[0] == golden.config["pad_token_id"])[..., None], x.detach(), x)
        )
    return compared(golden, model)


def compared(golden: Golden, model: Model) -> list[Finding]:
    """Compare the encoder's output, logits, gradients, and logits in steps."""
    source, tokens = golden.input("input_ids"), golden.input("decoder_input_ids")
    valid = golden.input("attention_mask").bool()
    memory = model.encode(source, valid)
    findings = golden.compare({"logits": model(tokens, memory=memory), "encoder_last_hidden": memory.x})
    with torch.no_grad():
        lengths = torch.full((len(tokens),), tokens.shape[1])
        steps = in_random_steps(Subject(model), tokens, lengths, model.encode(source, valid), max_step=5)
    return findings + golden.compare({"logits": steps}, gradients=False)


CASES = {"t5": encoder_decoder, "t5v11": encoder_decoder, "marian": marian}
