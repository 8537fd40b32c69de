"""Long sequences: Hugging Face's Longformer and BigBird, and torchscale's dilated attention (LongNet)."""

import json

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import Context, Embed, Norm, Pattern, part, watch
from regard.core.stack import Stack
from regard.parts.mixers.longnet import LongNet
from regard.parts.patterns.heads import Heads
from regard.parts.patterns.matrix import Matrix
from regard.parts.positions.learned import Learned
from regard.verify.golden import Golden
from regard.verify.laws import Finding, Subject, in_random_steps

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
}


def pair(ours: str, theirs: str, bias: bool = True) -> dict:
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")[: 1 + bias]}


class Silent(Norm):
    """There, heads of a padded query read nothing, and the golden compares its row too."""

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return x if valid is None else x * valid[..., None]


class FromPad(Learned):
    """RoBERTa's positions: counted from pad + 1 on, and `pad` itself for padding, which learns nothing."""

    ids: Tensor
    pad: int

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        real = self.ids != self.pad
        return x + F.embedding(torch.where(real, real.cumsum(1) + self.pad, self.pad), self.table, padding_idx=self.pad)


def bert_like(
    golden: Golden, mixers: list[dict], embed: Embed, more: tuple = (), silent: bool = True, **context
) -> list[Finding]:
    """Post-norm layers of one mixer each, on the golden's tokens; the last hidden vectors and the first layer's."""
    c = golden.config
    norm = {"part": "layer", "eps": c["layer_norm_eps"]}
    forward = {"part": "mlp", "hidden": c["intermediate_size"], "activation": ACTIVATIONS[c["hidden_act"]]}
    layers = [{"mixer": mixer, "feedforward": forward, "wiring": {"part": "post", "norm": norm}} for mixer in mixers]
    stack = Stack(c["hidden_size"], c["num_hidden_layers"], layers, c["num_attention_heads"])
    names = {}
    for i, layer in enumerate(stack.layers):
        if silent:
            layer.branches["mixer"].norm = Silent()
        ours, theirs = f"layers.{i}", f"encoder.layer.{i}"
        for q, original in (("q", "query"), ("k", "key"), ("v", "value"), *more):
            names |= pair(f"{ours}.branches.mixer.{q}", f"{theirs}.attention.self.{original}", c.get("use_bias", True))
        names |= pair(f"{ours}.branches.mixer.out", f"{theirs}.attention.output.dense")
        names |= pair(f"{ours}.branches.feedforward.into", f"{theirs}.intermediate.dense")
        names |= pair(f"{ours}.branches.feedforward.out", f"{theirs}.output.dense")
        names |= pair(f"{ours}.wiring.norms.0.inner", f"{theirs}.attention.output.LayerNorm")
        names |= pair(f"{ours}.wiring.norms.1.inner", f"{theirs}.output.LayerNorm")
    golden.load(stack, names)
    tables = {"table": "word", "segment_table": "token_type", "position.table": "position"}
    names = {ours: f"embeddings.{theirs}_embeddings.weight" for ours, theirs in tables.items()}
    golden.load(embed, names | pair("norm.inner", "embeddings.LayerNorm"))
    ids, valid = golden.input("input_ids"), golden.input("attention_mask").bool()
    embed.table.register_hook(lambda g: g.index_fill(0, torch.tensor(c["pad_token_id"]), 0.0))  # learns nothing there
    x = embed(ids, Context.begin(*ids.shape, valid=valid))
    with watch(stack, "layers.0.out") as seen:
        y = stack(x, Context.begin(*ids.shape, valid=valid, **context))
    return golden.compare({"last_hidden": y, "hidden1": seen["layers.0.out"][0]})


def embedding(c: dict, position: object) -> Embed:
    norm = {"part": "layer", "eps": c["layer_norm_eps"]}
    spec = {"part": "segments", "types": c["type_vocab_size"], "norm": norm, "position": position}
    return part(Embed, spec, width=c["hidden_size"], vocab=c["vocab_size"], scale=c.get("rescale_embeddings", False))


def longformer(golden: Golden) -> list[Finding]:
    """The hubs of each row come as segment 1. A window of w there is w / 2 on either side."""
    c = golden.config
    position = FromPad(c["hidden_size"], c["max_position_embeddings"])
    position.ids, position.pad = golden.input("input_ids"), c["pad_token_id"]
    windows = c["attention_window"]
    windows = windows if isinstance(windows, list) else [windows] * c["num_hidden_layers"]
    mixers = [
        {"part": "longformer", "pattern": f"window({w // 2 + 1})", "hubs": 0, "segment": 1, "kernel": kernel}
        for w, kernel in zip(windows, ["auto", "blocks"] * len(windows), strict=False)
    ]
    more = (("hub.q", "query_global"), ("hub.k", "key_global"), ("hub.v", "value_global"))
    return bert_like(golden, mixers, embedding(c, position), more, segments=golden.input("global_attention_mask"))


def bigbird(golden: Golden) -> list[Finding]:
    """Its own and both neighbouring blocks, the first and the last, which see all, and the golden's random ones."""
    c = golden.config
    length, size = golden.input("input_ids").shape[1], c["block_size"]
    blocks = -(-length // size)
    ends = range((blocks - 1) * size, length)
    full = c["attention_type"] != "block_sparse" or length <= (5 + 2 * c["num_random_blocks"]) * size
    place, mixers = torch.arange(length) // size, []
    for layer in range(c["num_hidden_layers"]):
        regular = Pattern.parse(
            f"block({size}, {size}, {size}) | global_tokens({size}, at=({', '.join(map(str, ends))},))"
        )
        heads = []
        for chosen in () if full else golden.extra(f"rand_attn_layer{layer}"):  # (blocks - 2, random)
            links = torch.zeros(blocks, blocks, dtype=torch.bool)
            links[1:-1] = links[1:-1].scatter(1, chosen, True)
            links = links[place][:, place]
            assert not (links & regular.mask(length)[0]).any(), "no link stands for a key that is seen anyway"
            heads.append(regular | Matrix(links))
        pattern = Heads(tuple(heads)) if heads else Pattern.parse("everything")
        kernel = ("auto", "blocks")[layer % 2]
        mixers.append(
            {"part": "attention", "pattern": pattern, "kernel": kernel, "bias": "qkvo" if c["use_bias"] else "o"}
        )
    position = Learned(c["hidden_size"], c["max_position_embeddings"])
    return bert_like(golden, mixers, embedding(c, position), silent=not full)


def longnet(golden: Golden) -> list[Finding]:
    """By branches; and, in eval mode or step by step, as one softmax."""
    c = golden.config
    branches = [
        json.loads(c[name]) if isinstance(c[name], str) else c[name] for name in ("segment_length", "dilated_ratio")
    ]
    mixer = LongNet(
        c["encoder_embed_dim"],
        c["encoder_attention_heads"],
        *branches,
        causal=c["causal"],
        offsets="groups",
        shares="constant",
        norm={"part": "layer", "eps": c.get("layernorm_eps", 1e-5)} if c["subln"] else "none",
    )
    names = {}
    for ours, theirs in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("out", "out_proj")):
        names |= pair(ours, theirs)
    golden.load(mixer, names | (pair("norm.inner", "inner_attn_ln") if c["subln"] else {}))
    x = golden.input("x")
    findings = golden.compare({"out": mixer(x, Context.begin(*x.shape[:2]))})
    with torch.no_grad():
        findings += golden.compare({"out": mixer(x, Context.begin(*x.shape[:2]))}, gradients=False)
        if mixer.streams:
            steps = in_random_steps(Subject(mixer), x.double(), torch.full((len(x),), x.shape[1]), None, max_step=5)
            findings += golden.compare({"out": steps}, gradients=False)
    return findings


CASES = {
    "longformer": longformer,
    "bigbird": bigbird,
    "longnet_dilated": longnet,
    "longnet_dilated_causal": longnet,
}
