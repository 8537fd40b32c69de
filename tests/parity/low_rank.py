"""Fewer keys: lucidrains' Linformer and memory-compressed attention, tensor2tensor's form of the latter, and Hugging
Face's and lucidrains' Reformers."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Context, Mixer, build, watch
from regard.ops import lsh
from regard.parts.mixers.compressed import Compressed
from regard.parts.mixers.linformer import Linformer
from regard.parts.mixers.lsh import Lsh
from regard.verify.golden import Golden
from regard.verify.laws import Finding


def linformer(golden: Golden) -> list[Finding]:
    """There, to share E and F is to share the maps of keys and values too; the paper shares only the former."""
    c = golden.config
    shared = c["share_kv"]
    mixer = Linformer(
        c["dim"],
        c["heads"],
        length=c["seq_len"],
        rank=c["k"],
        share="kv" if shared else "heads",
        kv_heads=1 if c["one_kv_head"] else c["heads"],
        dim=c.get("dim_head") or c["dim"] // c["heads"],
        bias="o",
    )
    names = {"q.weight": "to_q.weight", "k.weight": "to_k.weight", "down_k": lambda w: w("proj_k")[None]}
    names |= {"out.weight": "to_out.weight", "out.bias": "to_out.bias"}
    if shared:
        mixer.v = mixer.k
    else:
        names |= {"v.weight": "to_v.weight", "down_v": lambda w: w("proj_v")[None]}
    golden.load(mixer, names)
    x = golden.input("x")
    return golden.compare({"out": mixer(x, Context.begin(*x.shape[:2]))})


def memcompress(golden: Golden) -> list[Finding]:
    """Scores are divided by the root of the whole width there. Where the length is no multiple of the factor the
    original puts zeros before the sequence, so that its groups, and with them every output, depend on the length; ours
    begin at the first position, so the zeros are put there by the test."""
    c = golden.config
    mixer = Compressed(
        c["dim"],
        c["heads"],
        factor=c["compression_factor"],
        causal=c["causal"],
        score={"part": "scaled_dot", "scale": c["dim"] ** -0.5},
        bias="o",
    )
    names = {"first_key": lambda w: w("null_k")[0, 0], "first_value": lambda w: w("null_v")[0, 0]}
    for kind in ("weight", "bias"):
        names |= {f"squeeze.{kind}": f"compress_fn.conv.{kind}", f"out.{kind}": f"to_out.{kind}"}
    for index, letter in enumerate("qkv"):
        names[f"{letter}.weight"] = lambda w, index=index: w("to_qkv.weight").chunk(3)[index]
    golden.load(mixer, names)
    return both_ways(golden, mixer, before=-golden.input("x").shape[1] % c["compression_factor"])


def memcompress_t2t(golden: Golden) -> list[Finding]:
    """Dense kernels are (in, out) there, and those of convolutions (1, size, in, out)."""
    c = golden.config
    mixer = Compressed(
        c["dim"], c["heads"], factor=c["factor"], compress="input", first="position", strict=True, bias=False
    )
    scope = "multihead_self_attention_reduced"
    names = {
        "squeeze.weight": lambda w: w(f"{scope}/conv_elems_1d/conv2d/kernel")[0].permute(2, 1, 0),
        "squeeze.bias": f"{scope}/conv_elems_1d/conv2d/bias",
    }
    for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "output_transform")):
        names[f"{ours}.weight"] = lambda w, theirs=theirs: w(f"{scope}/multihead_attention/{theirs}/kernel").mT
    golden.load(mixer, names)
    return both_ways(golden, mixer)


def hugging_face(c: dict) -> dict:
    """Hugging Face's LSH attention: keys of other buckets in a chunk are seen, and what several rounds find counts as
    often."""
    return {
        "heads": c["num_attention_heads"],
        "dim": c["attention_head_size"],
        "buckets": c["num_buckets"],
        "rounds": c["num_hashes"],
        "size": c["lsh_attn_chunk_length"],
        "before": c["lsh_num_chunks_before"],
        "after": c["lsh_num_chunks_after"],
        "causal": c["is_decoder"],
        "cut": "chunks",
        "across": True,
        "repeats": True,
        "seed": c["hash_seed"],
    }


def rounded(mixer: Lsh, lowest: float) -> Callable[[str, Tensor], Tensor]:
    """The originals give a position that sees only itself a score like -100000, where neighbouring float32 are 0.008
    apart, so that what its rounds weigh does not sum to 1. An edit of the weights, by which ours do as well: in each
    round a position meets itself once, or twice where its chunk is seen from around the end."""
    told: list[Tensor] = []
    plain = mixer.bucket_ids
    mixer.bucket_ids = lambda qk: told.append(plain(qk)) or told[-1]

    def edit(path: str, weights: Tensor) -> Tensor:
        lengths = torch.full((len(weights),), weights.shape[-1])
        order = lsh.sort(told[-1], lengths, mixer.rule)
        times = []
        for number in range(mixer.rounds):
            keys = lsh.neighbor_keys(order, number, lengths, mixer.rule)
            met = (order.at[:, :, number][..., None] == keys[..., None, :]).sum(-1)
            times.append(lsh.gather(met.flatten(2), order.place[:, :, number]))
        often = torch.stack(times).float()  # (rounds, batch, heads, time)
        score = lowest + often.log()
        total = (often * torch.exp(lowest - score) * torch.exp(score - score.logsumexp(0))).sum(0)
        alone = weights.diagonal(dim1=-2, dim2=-1) > 0
        return torch.where(alone[..., None], weights * total[..., None], weights)

    return edit


def reformer_lsh_hf(golden: Golden) -> list[Finding]:
    """The golden ends before the last map."""
    c = golden.config
    mixer = Lsh(c["hidden_size"], **hugging_face(c))
    mixer.out = nn.Identity()
    golden.load(mixer, {"qk.weight": "query_key.weight", "v.weight": "value.weight"})
    drawn, found = golden.extra("rotations"), []
    if c["hash_seed"] is not None:
        gap = float((mixer.rotations - drawn).abs().max())
        found.append(Finding(f"{golden.path.stem} rotations from the seed", gap, 0.0))
    mixer.rotations.copy_(drawn)
    x = golden.input("x")
    with watch(mixer, "weights", rounded(mixer, -1e5)):
        y = mixer(x, Context.begin(*x.shape[:2]))
    return found + golden.compare({"out": y, "buckets": buckets(mixer, mixer.project(x)[0])})


def reformer_lsh_lucid(golden: Golden) -> list[Finding]:
    """The original has as many buckets as the sequence has chunks, and is given queries and values, a head in a row."""
    c = golden.config
    qk, v = golden.input("qk"), golden.input("v")
    batch, time, dim = qk.shape
    size, rounds = c["bucket_size"], c["n_hashes"]
    mixer = Lsh(
        dim,
        1,
        buckets=time // size,
        rounds=rounds,
        size=size,
        causal=c["causal"],
        cut="chunks",
        across=c["attend_across_buckets"],
        repeats=c["allow_duplicate_attention"],
        scale=dim**-0.5,
        eps=1e-12,
    )
    mixer.rotations.copy_(golden.extra("rotations"))
    q, lengths = qk[:, None], torch.full((batch,), time)
    lowest = -5e4 - (0.0 if c["allow_duplicate_attention"] else math.log(rounds))
    edit = rounded(mixer, lowest)
    with watch(mixer, "weights", edit) as seen:
        y = mixer.attend(q, mixer.keys(q), v[:, None], mixer.bucket_ids(q), lengths)[:, 0]
    weights = edit("", seen["weights"][0])
    ours = {"out": y, "attn": weights[:, 0], "buckets": buckets(mixer, q).flatten(1)}
    return golden.compare({name: value for name, value in ours.items() if f"out.{name}" in golden})


def buckets(mixer: Lsh, qk: Tensor) -> Tensor:
    """(batch, heads, rounds, time), those of each round numbered after those of the one before."""
    return mixer.bucket_ids(qk) + math.prod(mixer.buckets) * torch.arange(mixer.rounds)[:, None]


def reformer_full_hf(golden: Golden) -> list[Finding]:
    """Its chunks look ahead, so to us it is no decoder that steps but a stack that takes whole sequences."""
    c = golden.config
    norm, causal = {"part": "layer", "eps": c["layer_norm_eps"]}, "causal & " if c["is_decoder"] else ""
    size, width = c["local_attn_chunk_length"], c["hidden_size"]
    local = {
        "part": "attention",
        "pattern": f"{causal}block({size}, before={size * c['local_num_chunks_before']})",
        "dim": c["attention_head_size"],
        "bias": False,
    }
    sorts = {"lsh": {"part": "lsh", **hugging_face(c)}, "local": local}
    feedforward = {"part": "mlp", "hidden": c["feed_forward_size"], "activation": c["hidden_act"]}
    wiring = {"part": "reversible", "norm": norm, "join": "concat"}
    position = {"part": "learned", "length": c["max_position_embeddings"]}
    if c["axial_pos_embds"]:
        position = {"part": "axial", "shape": list(c["axial_pos_shape"]), "dims": list(c["axial_pos_embds_dim"])}
    model = build({
        "vocab": c["vocab_size"],
        "model": {
            "kind": "encoder",
            "width": width,
            "heads": c["num_attention_heads"],
            "depth": c["num_hidden_layers"],
            "embed": {"part": "tokens", "scale": False, "position": position},
            "norm": norm,
            "head": "vocabulary",
            "layer": [{"mixer": sorts[sort], "ff": feedforward, "wiring": wiring} for sort in c["attn_layers"]],
        },
    })  # fmt: skip
    names = {"embed.table": "reformer.embeddings.word_embeddings.weight", "head.table": "lm_head.decoder.weight"}
    places = "reformer.embeddings.position_embeddings"
    names |= pair("stack.norm.inner", "reformer.encoder.layer_norm")
    if c["axial_pos_embds"]:
        names["embed.position.rows"] = lambda w: w(f"{places}.weights.0")[:, 0]
        names["embed.position.columns"] = lambda w: w(f"{places}.weights.1")[0]
    else:
        names["embed.position.table"] = f"{places}.embedding.weight"
    for i, sort in zip(range(c["num_hidden_layers"]), c["attn_layers"], strict=False):
        ours, theirs = f"stack.layers.{i}", f"reformer.encoder.layers.{i}"
        maps = {"qk": "query_key", "v": "value"} if sort == "lsh" else {"q": "query", "k": "key", "v": "value"}
        for letter, name in maps.items():
            names[f"{ours}.branches.mixer.{letter}.weight"] = f"{theirs}.attention.self_attention.{name}.weight"
        names[f"{ours}.branches.mixer.out.weight"] = f"{theirs}.attention.output.dense.weight"
        names |= pair(f"{ours}.branches.ff.into", f"{theirs}.feed_forward.dense.dense")
        names |= pair(f"{ours}.branches.ff.out", f"{theirs}.feed_forward.output.dense")
        names |= pair(f"{ours}.wiring.norms.0.inner", f"{theirs}.attention.layer_norm")
        names |= pair(f"{ours}.wiring.norms.1.inner", f"{theirs}.feed_forward.layer_norm")
    golden.load(model, names)
    edits = {
        f"stack.layers.{i}.branches.mixer.weights": rounded(layer.branches["mixer"], -1e5)
        for i, layer in enumerate(model.stack.layers)
        if isinstance(layer.branches["mixer"], Lsh)
    }
    with watch(model, "*.mixer.weights", lambda path, weights: edits[path](path, weights)):
        logits = model(golden.input("input_ids"))
    return golden.compare({"logits": logits})


def pair(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}


def both_ways(golden: Golden, mixer: Mixer, before: int = 0) -> list[Finding]:
    """At once, with gradients, and in steps where there are any; `before` zeros come first."""
    x = F.pad(golden.input("x"), (0, 0, before, 0))
    found = golden.compare({"out": mixer(x, Context.begin(*x.shape[:2]))[:, before:]})
    if not mixer.streams:
        return found
    with torch.no_grad():
        return found + golden.compare({"out": steps(mixer, x)[:, before:]}, gradients=False)


def steps(mixer: Mixer, x: Tensor) -> Tensor:
    """The outputs for x (batch, time, width), in steps of random sizes."""
    batch, time = x.shape[:2]
    state, begin, outputs = mixer.start(Context.begin(batch, 0), time), 0, []
    while begin < time:
        part = x[:, begin : begin + int(torch.randint(1, 6, ()))]
        y, state = mixer.step(part, state, Context.after(torch.full((batch,), begin), part.shape[1]))
        outputs.append(y)
        begin += part.shape[1]
    return torch.cat(outputs, 1)


CASES = {
    "linformer": linformer,
    "linformer_shared": linformer,
    "memcompress": memcompress,
    "memcompress_causal": memcompress,
    "memcompress_t2t": memcompress_t2t,
    "reformer_full_hf": reformer_full_hf,
    "reformer_lsh_hf": reformer_lsh_hf,
    "reformer_lsh_hf_causal": reformer_lsh_hf,
    "reformer_lsh_lucid": reformer_lsh_lucid,
}
