"""Attention before the Transformer: OpenNMT's GlobalAttention and decoders, and bentrevett's Bahdanau notebook."""

import torch
from torch import Tensor

from regard.core import Context, Memory, Model, watch
from regard.parts.mixers.luong import Attentional
from regard.verify.golden import Golden
from regard.verify.laws import Finding

# OpenNMT's kinds of attention: our score, and whether the attentional vector is bent and biased.
KINDS = {
    "dot": {"score": "dot", "activation": "tanh", "bias": False},
    "general": {"score": "general", "activation": "tanh", "bias": False},
    "mlp": {"score": "additive", "activation": "identity", "bias": True},
}


def global_attention(kind: str, theirs: str) -> dict:
    """Ours, inside an Attentional, from OpenNMT's, whose names begin with `theirs`."""
    names: dict = {"out.weight": f"{theirs}linear_out.weight"}
    if kind == "general":  # theirs maps the query, ours the key
        names["look.score.weight"] = lambda w: w(f"{theirs}linear_in.weight").T[None]
    if kind == "mlp":
        names |= {f"look.score.of_query.{n}": f"{theirs}linear_query.{n}" for n in ("weight", "bias")}
        names |= {
            "out.bias": f"{theirs}linear_out.bias",
            "look.score.of_key.weight": f"{theirs}linear_context.weight",
            "look.score.v.weight": f"{theirs}v.weight",
        }
    return names


def rnn(ours: str, theirs: str, layers: int, directions: int) -> dict:
    """torch's own names on both sides; `theirs` may hold {layer} where a layer is a cell of its own."""
    names = {}
    for layer in range(layers):
        for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            for back in ("", "_reverse")[:directions]:
                tail = "" if "{layer}" in theirs else f"_l{layer}{back}"
                names[f"{ours}.cells.inner.{kind}_l{layer}{back}"] = f"{theirs.format(layer=layer)}.{kind}{tail}"
    return names


def under(prefix: str, names: dict) -> dict:
    return {f"{prefix}.{ours}": theirs for ours, theirs in names.items()}


def prefix_mask(lengths: Tensor, time: int) -> Tensor:
    return torch.arange(time) < lengths[:, None]


def attention(golden: Golden) -> list[Finding]:
    """OpenNMT's GlobalAttention is the piece of `luong` that looks at the memory."""
    c = golden.config
    piece = Attentional(c["dim"], c["dim"], **KINDS[c["attn_type"]])
    golden.load(piece, global_attention(c["attn_type"], ""))
    query, memory = golden.input("query"), golden.input("memory")
    valid = prefix_mask(golden.input("src_len"), memory.shape[1])
    context = Context.begin(*query.shape[:2], memory=Memory(memory, valid))
    y, weights = piece(query, piece.look.source(context, "luong"))
    return golden.compare({"attn_h": y, "align": weights[:, 0]})


def seq2seq(encoder: dict, decoder: dict, width: int, vocab: tuple[int, int]) -> Model:
    return Model(
        kind="encoder-decoder",
        width=width,
        vocab=vocab,
        embed={"part": "tokens", "scale": False},
        head={"part": "vocabulary", "bias": True},
        encoder={"layer": {"mixer": encoder, "wiring": "plain"}},
        decoder={"layer": {"mixer": decoder, "wiring": "plain"}},
    )


def opennmt(golden: Golden) -> list[Finding]:
    """The encoder's last states begin the decoder. With input feeding each of its layers is a cell of its own."""
    c, feed = golden.config, golden.system == "luong_inputfeed"
    cell, layers, dim, directions = c["rnn"].lower(), c["layers"], c["dim"], 2 if c["bidirectional_encoder"] else 1
    tables = {"source_embed.table": "src_emb.weight", "embed.table": "decoder.embeddings.e.weight"}
    model = seq2seq(
        {"part": cell, "hidden": dim // directions, "layers": layers, "both": directions == 2},
        {"part": "luong", "hidden": dim, "cell": cell, "layers": layers, "feed": feed, **KINDS[c["attn"]]},
        dim,
        tuple(golden.weight(name).shape[0] for name in tables.values()),
    )
    ours = "stack.layers.0.branches.mixer"
    golden.load(
        model,
        tables
        | rnn("encoder.layers.0.branches.mixer", "encoder", layers, directions)
        | rnn(ours, "decoder.rnn.layers.{layer}" if feed else "decoder.rnn", layers, 1)
        | under(f"{ours}.attentional", global_attention(c["attn"], "decoder.attn."))
        | {"head.table": "generator.weight", "head.bias": "generator.bias"},
    )
    source, target = golden.input("src"), golden.input("tgt")
    memory = model.encode(source, prefix_mask(golden.input("src_len"), source.shape[1]))
    context = Context.begin(*target.shape, memory=memory)
    with watch(model, "*weights") as seen:
        hidden = model.hidden(target, context)
    (align,) = seen[f"{ours}.weights"]
    return golden.compare({"logits": model.head(hidden, context), "dec_out": hidden, "align": align[:, 0]})


def bahdanau(golden: Golden) -> list[Finding]:
    """Theirs is time-major, and never predicts position 0: its scores there are zeros, ours begin at position 1. Its
    attention is one matrix over [state; memory] where ours has two."""
    c = golden.config
    dec = c["dec_hidden"]
    tables = {"source_embed.table": "encoder.embedding.weight", "embed.table": "decoder.embedding.weight"}
    model = seq2seq(
        {"part": "gru", "hidden": c["enc_hidden"], "both": True},
        {"part": "bahdanau", "hidden": dec},
        c["emb"],
        tuple(golden.weight(name).shape[0] for name in tables.values()),
    )
    ours, theirs = "stack.layers.0.branches.mixer", "decoder.attention"
    names = {
        f"{ours}.look.score.of_query.weight": lambda w: w(f"{theirs}.attn_fc.weight")[:, :dec],
        f"{ours}.look.score.of_query.bias": f"{theirs}.attn_fc.bias",
        f"{ours}.look.score.of_key.weight": lambda w: w(f"{theirs}.attn_fc.weight")[:, dec:],
        f"{ours}.look.score.v.weight": f"{theirs}.v_fc.weight",
    }
    for kind in ("weight", "bias"):
        names[f"{ours}.first.{kind}"] = f"encoder.fc.{kind}"
        names["head.table" if kind == "weight" else "head.bias"] = f"decoder.fc_out.{kind}"
    rnns = rnn("encoder.layers.0.branches.mixer", "encoder.rnn", 1, 2) | rnn(ours, "decoder.rnn", 1, 1)
    golden.load(model, tables | rnns | names)
    source, target = golden.input("src").T, golden.input("tgt").T
    memory = model.encode(source)
    with watch(model, "*weights") as seen:
        scores = model(target[:, :-1], memory=memory)
    (align,) = seen[f"{ours}.weights"]
    logits = torch.cat((torch.zeros_like(scores[:, :1]), scores), 1).transpose(0, 1)
    return golden.compare({"logits": logits, "align_step1": align[:, 0, 0], "enc_out": memory.x.transpose(0, 1)})


CASES = {
    "attn_dot": attention,
    "attn_general": attention,
    "attn_mlp": attention,
    "luong_inputfeed": opennmt,
    "rnn_std_mlp": opennmt,
    "bahdanau_seq2seq": bahdanau,
}
