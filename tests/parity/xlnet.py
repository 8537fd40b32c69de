"""XLNet of Hugging Face: both streams, with a memory and without, sentences and an order given by a mask."""

import torch

from regard.core import Context, Pattern, State, find
from regard.parts.objectives.permuted import initial_state, query_positions
from regard.verify.golden import Golden
from regard.verify.laws import Finding


def xlnet(golden: Golden) -> list[Finding]:
    model, tokens = golden.convert(), golden.input("input_ids")
    segments, asked = golden.input("token_type_ids"), golden.input("target_mapping").argmax(-1)
    batch, time = tokens.shape
    past = [golden.input(f"mems{i}").transpose(0, 1) for i in range(golden.config["n_layer"])]
    count = past[0].shape[1]
    hidden = golden.input("perm_mask") > 0  # (batch, query, key), by their places in the segment
    allowed = torch.ones(batch, count + time, count + time, dtype=torch.bool)
    allowed[:, count:, count:] = ~hidden
    order = find(Pattern, "matrix")(allowed)

    empty = initial_state(model, batch, count)
    at = torch.arange(count).expand(batch, count)
    layers = [(state._replace(x=x, at=at), *rest) for x, (state, *rest) in zip(past, empty.layers, strict=True)]
    state = State.of_new_buffers(empty.lengths, tuple(layers))
    _, queries, after = query_positions(model, tokens, asked, state, pattern=order, segments=segments)
    outputs = {"query_logits": model.head(queries, Context.begin(*asked.shape))}
    outputs["content_logits_nomem"] = model(tokens, segments=segments)
    for i, (state, *_) in enumerate(after.layers):
        if f"out.new_mem{i}" in golden:
            kept = min(count + time, state.x.shape[1])
            outputs[f"new_mem{i}"] = state.x[:, state.x.shape[1] - kept :].transpose(0, 1)
    return golden.compare(outputs)


CASES = {"xlnet": xlnet}
