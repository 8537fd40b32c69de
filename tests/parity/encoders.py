"""Encoders of families that regard/convert reads, by its rules: BERT with both its heads, RoFormer."""

from torch import Tensor

from regard.core import Context, Model, watch
from regard.verify.golden import Golden
from regard.verify.laws import Finding


def seen(golden: Golden, model: Model) -> tuple[Tensor, Context, dict[str, Tensor]]:
    """Compare the last hidden states of the padded batch with its segments, and the intermediate outputs of the golden
    file."""
    tokens, valid = golden.input("input_ids"), golden.input("attention_mask").bool()
    context = Context.begin(*tokens.shape, valid=valid, segments=golden.input("token_type_ids"))
    with watch(model.stack, "layers.*") as found:
        x = model.hidden(tokens, context)
    more = {"last_hidden": x}
    for i in range(len(model.stack.layers)):
        more[f"attn{i}"] = found[f"layers.{i}.branches.mixer.attend.weights"][0]
    return x, context, {name: value for name, value in more.items() if "out." + name in golden}


def bert(golden: Golden) -> list[Finding]:
    model = golden.convert()
    x, context, more = seen(golden, model)
    scores = {"prediction_logits": model.head(x, context), "seq_relationship_logits": model.head.pair(x, context)}
    return golden.compare(scores | more)


def roformer(golden: Golden) -> list[Finding]:
    model = golden.convert()
    x, context, more = seen(golden, model)
    return golden.compare({"logits": model.head(x, context), **more})


CASES = {"bert": bert, "roformer": roformer}
