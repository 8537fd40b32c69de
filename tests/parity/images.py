"""Systems that look at images: ViT, CLIP."""

import torch

from regard.core import Context
from regard.verify.golden import Golden
from regard.verify.laws import Finding


def vit(golden: Golden) -> list[Finding]:
    model, images = golden.convert(), golden.input("pixel_values")
    seen: dict = {}
    hooks = [
        model.embed.register_forward_hook(lambda module, given, y: seen.update(embeddings=y)),
        model.stack.norm.register_forward_hook(lambda module, given, y: seen.update(last_hidden=given[0])),
    ]
    scores = model(images)
    for hook in hooks:
        hook.remove()
    return golden.compare({"logits": scores} | {name: y for name, y in seen.items() if f"out.{name}" in golden})


def clip(golden: Golden) -> list[Finding]:
    c = golden.config
    config = {"model_type": "clip", "text_config": c["text"], "vision_config": c["vision"]}
    model = golden.convert(config | {key: value for key, value in c.items() if key not in ("text", "vision")})
    tokens, valid = golden.input("input_ids"), golden.input("attention_mask").bool()
    images, texts = model.encode_images(golden.input("pixel_values")), model.encode_texts(tokens, valid)
    scores = model.similarity(images, texts)
    hidden = model.text.hidden(tokens, Context.begin(*tokens.shape, valid=valid))
    hidden = torch.where(valid[..., None], hidden, golden.output("text_last_hidden"))  # padding means nothing here
    outputs = {
        "logits_per_text": scores.mT, "text_embeds": texts, "image_embeds": images, "text_last_hidden": hidden,
        "logits_per_image": scores,
    }  # fmt: skip
    return golden.compare({name: y for name, y in outputs.items() if f"out.{name}" in golden})


CASES = {"vit": vit, "clip": clip}
