"""The original Transformer: torch's nn.Transformer and Hugging Face's Marian."""

import torch

from regard.core import Context, Memory, build
from regard.core.stack import Stack
from regard.core.wiring import Place
from regard.verify.golden import Golden
from regard.verify.laws import Finding, Subject, stepwise


def torch_attention(ours: str, theirs: str, width: int) -> dict:
    """in_proj is [q; k; v] stacked."""
    names = {}
    for index, letter in enumerate("qkv"):
        rows = slice(index * width, (index + 1) * width)
        names[f"{ours}.{letter}.weight"] = lambda w, rows=rows: w(f"{theirs}.in_proj_weight")[rows]
        names[f"{ours}.{letter}.bias"] = lambda w, rows=rows: w(f"{theirs}.in_proj_bias")[rows]
    return names | {f"{ours}.out.{kind}": f"{theirs}.out_proj.{kind}" for kind in ("weight", "bias")}


def pair(ours: str, theirs: str) -> dict:
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}


def nn_transformer(golden: Golden) -> list[Finding]:
    c = golden.config
    width, wiring = c["d_model"], {"part": "pre" if c["norm_first"] else "post", "norm": norm(c["layer_norm_eps"])}
    ff = {"part": "mlp", "hidden": c["dim_feedforward"], "activation": c["activation"]}
    common = {"width": width, "heads": c["nhead"], "norm": norm(c["layer_norm_eps"])}
    encoder = Stack(
        depth=c["num_encoder_layers"],
        layer={"mixer": {"part": "attention", "pattern": "everything"}, "feedforward": ff, "wiring": wiring},
        **common,
    )
    decoder = Stack(
        depth=c["num_decoder_layers"],
        layer={
            "mixer": {"part": "attention", "pattern": "causal"},
            "cross": {"part": "attention", "over": "memory"},
            "feedforward": ff,
            "wiring": wiring,
        },
        place=Place(memory=width),
        **common,
    )
    for side, stack in (("encoder", encoder), ("decoder", decoder)):
        names = pair("norm.inner", f"{side}.norm")
        branches = {"mixer": "self_attn", "cross": "multihead_attn"} if side == "decoder" else {"mixer": "self_attn"}
        for i in range(len(stack.layers)):
            ours, theirs = f"layers.{i}", f"{side}.layers.{i}"
            for branch, original in branches.items():
                names |= torch_attention(f"{ours}.branches.{branch}", f"{theirs}.{original}", width)
            names |= pair(f"{ours}.branches.feedforward.into", f"{theirs}.linear1")
            names |= pair(f"{ours}.branches.feedforward.out", f"{theirs}.linear2")
            for n in range(len(branches) + 1):
                names |= pair(f"{ours}.wiring.norms.{n}.inner", f"{theirs}.norm{n + 1}")
        golden.load(stack, names)
    src, tgt, padded = golden.input("src"), golden.input("tgt"), golden.input("src_key_padding_mask")
    memory = encoder(src, Context.begin(*src.shape[:2], valid=~padded))
    out = decoder(tgt, Context.begin(*tgt.shape[:2], memory=Memory(memory, ~padded)))
    return golden.compare({"out": out, "memory": memory})


def norm(eps: float) -> dict:
    return {"part": "layer", "eps": eps}


BENDS = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "silu": "silu", "swish": "silu"}


def marian(golden: Golden) -> list[Finding]:
    c = golden.config
    branches = {"mixer": "self_attn", "cross": "encoder_attn", "feedforward": "final"}
    names = {"head.bias": lambda w: w("final_logits_bias")[0], "head.table": "lm_head.weight"}
    stacks = {}
    for side, prefix in (("encoder", "encoder"), ("decoder", "stack")):
        layer = {"mixer": {"part": "attention", "pattern": "everything" if side == "encoder" else "causal"}}
        if side == "decoder":
            layer["cross"] = {"part": "attention", "over": "memory"}
        bend = BENDS[c["activation_function"]]
        layer["feedforward"] = {"part": "mlp", "hidden": c[f"{side}_ffn_dim"], "activation": bend}
        layer["wiring"] = {"part": "post", "norm": norm(1e-5)}
        depth, heads = c[f"{side}_layers"], c[f"{side}_attention_heads"]
        stacks[side] = {"depth": depth, "heads": heads, "layer": [layer]}
        for i in range(depth):
            ours, theirs = f"{prefix}.layers.{i}", f"model.{side}.layers.{i}"
            for n, branch in enumerate(name for name in layer if name != "wiring"):
                names |= pair(f"{ours}.wiring.norms.{n}.inner", f"{theirs}.{branches[branch]}_layer_norm")
                if branch != "feedforward":
                    for letter in ("q", "k", "v", "out"):
                        original = f"{theirs}.{branches[branch]}.{letter}_proj"
                        names |= pair(f"{ours}.branches.{branch}.{letter}", original)
            names |= pair(f"{ours}.branches.feedforward.into", f"{theirs}.fc1")
            names |= pair(f"{ours}.branches.feedforward.out", f"{theirs}.fc2")
        names["source_embed.table" if side == "encoder" else "embed.table"] = f"model.{side}.embed_tokens.weight"
    tie = {(True, True): "all", (True, False): "source-target", (False, True): "target", (False, False): "none"}
    model = build(
        {
            "model": {
                "kind": "encoder-decoder",
                "width": c["d_model"],
                "tie": tie[c["share_encoder_decoder_embeddings"], c["tie_word_embeddings"]],
                "embed": {
                    "part": "tokens",
                    "scale": c["scale_embedding"],
                    "position": {"part": "sinusoidal", "layout": "halves"},
                },
                "head": {"part": "vocabulary", "bias": True},
                **stacks,
            }
        },
        vocab=(c["vocab_size"], c["decoder_vocab_size"]),
    )
    golden.load(model, {name: source for name, source in names.items() if name in dict(model.named_parameters())})
    model.head.bias.requires_grad_(False)  # there it is a buffer
    for embed in (model.source_embed, model.embed):  # there the padding token's vector learns from the output alone
        embed.register_forward_hook(
            lambda _, given, x: torch.where((given[0] == c["pad_token_id"])[..., None], x.detach(), x)
        )
    source, valid = golden.input("input_ids"), golden.input("attention_mask").bool()
    tokens = golden.input("decoder_input_ids")
    memory = model.encode(source, valid)
    findings = golden.compare({"logits": model(tokens, memory=memory), "encoder_last_hidden": memory.x})
    subject = Subject(model)
    with torch.no_grad():
        lengths = torch.full((len(tokens),), tokens.shape[1])
        steps = stepwise(subject, tokens, lengths, model.encode(source, valid), most=5)
    return findings + golden.compare({"logits": steps}, gradients=False)


CASES = {"nn_transformer": nn_transformer, "nn_transformer_preln": nn_transformer, "marian": marian}
