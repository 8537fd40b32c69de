"""Gated attention units (GAU, FLASH), retrieval across (Unlimiformer), white-box layers (CRATE), and involution."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Context, Mixer, Model, Position, build, watch
from regard.ops.rotary import rotate
from regard.parts.mixers.flash import Flash
from regard.parts.mixers.gau import Gau
from regard.parts.mixers.involution import Involution, apply_kernels, square_windows
from regard.parts.mixers.unlimiformer import Unlimiformer
from regard.parts.positions.t5 import T5
from regard.verify.golden import Golden
from regard.verify.laws import Finding, Subject, in_random_steps


def pair(ours: str, theirs: str) -> dict:
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}


class Places(Position):
    """The original multiplies T5's bias by a constant that no paper has, in GAU before it divides by the length. Its
    speeds of rotary are weights, but it remembers the angles after their first use, on the near queries, without their
    gradient. Both are the same family of functions as ours."""

    relative = True

    def __init__(self, width: int, causal: bool, factor: float, rates: Tensor | None = None):
        super().__init__()
        self.t5, self.factor = T5(width, 1, bidirectional=not causal), factor
        self.rates = None if rates is None else nn.Parameter(rates.clone())
        self.remembered = False

    def query(self, q: Tensor, at: Tensor) -> Tensor:
        if self.rates is None:
            return q
        angle = at[:, None, :, None].to(q.dtype) * (self.rates.detach() if self.remembered else self.rates)
        self.remembered = True
        turned = 2 * len(self.rates)
        return torch.cat((rotate(q[..., :turned], angle.cos(), angle.sin(), "interleaved"), q[..., turned:]), -1)

    def key(self, k: Tensor, at: Tensor) -> Tensor:
        return self.query(k, at)

    def bias(self, query_at: Tensor, key_at: Tensor, q: Tensor) -> Tensor:
        return self.t5.bias(query_at, key_at, q) * self.factor


def unit(golden: Golden, mixer: Mixer, offsets: str, out: str, shift: bool) -> list[Finding]:
    """x + mixer(norm(x)), whole and in steps."""
    norm = nn.LayerNorm(mixer.width)
    golden.load(norm, {"weight": "norm.weight", "bias": "norm.bias"})
    names = pair("unit.into", "to_hidden.0") | pair("unit.base", "to_qk.0") | pair("unit.out", out)
    names |= {"unit.offsets.gain": f"{offsets}.gamma", "unit.offsets.shift": f"{offsets}.beta"}
    names["position.t5.table"] = "rel_pos_bias.relative_attention_bias.weight"
    if mixer.position.rates is not None:
        names["position.rates"] = "rotary_pos_emb.freqs"
    golden.load(mixer, names)
    x = golden.input("x")
    inside = norm(x)
    if shift:  # not in the paper: half of the channels come from the position before
        before, here = inside.chunk(2, -1)
        inside = torch.cat((F.pad(before, (0, 0, 1, -1)), here), -1)
    findings = golden.compare({"out": x + mixer(inside, Context.begin(*x.shape[:2]))})
    if mixer.streams:
        with torch.no_grad():
            lengths = torch.full((len(x),), x.shape[1])
            steps = in_random_steps(Subject(mixer), inside.double(), lengths, None, max_step=5)
        findings += golden.compare({"out": x + steps}, gradients=False)
    return findings


def gau(golden: Golden) -> list[Finding]:
    c, length = golden.config, golden.input("x").shape[1]
    mixer = Gau(
        width=c["dim"],
        hidden=int(c["dim"] * c["expansion_factor"]),
        dim=c["query_key_dim"],
        pattern="causal" if c["causal"] else "everything",
        position=Places(c["dim"], c["causal"], c["dim"] ** 0.5 / length),
        weights="laplace" if c.get("laplace_attn_fn") else "relu_squared",
        length=length,
    )
    return unit(golden, mixer, "offsetscale", "to_out.0", shift=False)


def flash(golden: Golden) -> list[Finding]:
    c = golden.config
    rates = golden.weight("rotary_pos_emb.freqs") if c["rotary_dim"] else None
    mixer = Flash(
        width=c["dim"],
        hidden=int(c["dim"] * c["expansion_factor"]),
        dim=c["query_key_dim"],
        chunk=c["group_size"],
        causal=c["causal"],
        position=Places(c["dim"], c["causal"], c["query_key_dim"] ** 0.5, rates),
        weights="laplace" if c.get("laplace_attn_fn") else "relu_squared",
    )
    return unit(golden, mixer, "qk_offset_scale", "to_out", shift=c["shift_tokens"])


def unlimiformer(golden: Golden) -> list[Finding]:
    """Token by token, its only form. The original's first step looks at the first window alone, as an ordinary BART:
    that is how it feeds its prompt, not what the paper says, so the test does it with two memories."""
    c, bart = golden.config, golden.config["bart"]
    model, names = bart_model(golden, c["window"], c["chunk_overlap"], c["k"])
    golden.load(model, names)
    source, tokens = golden.input("src"), golden.input("dec")
    batch, time = tokens.shape
    model.eval()
    nearest = [m for m in model.modules() if isinstance(m, Unlimiformer)]
    with torch.no_grad():
        whole = model.start(batch, time, source=source)
        state = model.start(batch, time, source=source[:, : c["window"]])
        for mixer in nearest:
            mixer.nearest = c["window"]
        first, state = model.step(tokens[:, :1], state)
        for mixer in nearest:
            mixer.nearest = c["k"]
        mixed = tuple((own[0], full[1], own[2]) for own, full in zip(state.layers, whole.layers, strict=True))
        scores, state = [first], state._replace(layers=mixed)
        for some in tokens[:, 1:].split(2, 1):
            more, state = model.step(some, state)
            scores.append(more)
    findings = golden.compare({"logits": torch.cat(scores, 1)})
    for name in ("keys", "values"):
        kept = torch.stack([getattr(layer[1], name) for layer in whole.layers])
        gap = float((kept - golden.extra(f"prompt_{name}")).abs().max())
        findings.append(Finding(f"{golden.system}-{golden.variant} extra {name}", gap, 1e-5))
    assert len(whole.layers) == bart["decoder_layers"]
    return findings


def bart_model(golden: Golden, window: int, overlap: float, nearest: int) -> tuple[Model, dict]:
    """BART with an encoder in windows and retrieving cross-attention, and the names of its weights."""
    c, names = golden.config["bart"], {"head.bias": lambda w: w("final_logits_bias")[0]}
    heads = {side: c.get(f"{side}_attention_heads", c["encoder_attention_heads"]) for side in ("encoder", "decoder")}
    places = {"part": "learned", "length": c["max_position_embeddings"], "offset": 2}
    layers = {}
    for side, prefix in (("encoder", "encoder.layers.0.branches.mixer.stack"), ("decoder", "stack")):
        layer = {"mixer": {"part": "attention", "pattern": "everything" if side == "encoder" else "causal"}}
        if side == "decoder":
            layer["cross"] = {"part": "unlimiformer", "nearest": nearest}
        hidden = golden.weight(f"model.{side}.layers.0.fc1.bias").shape[0]
        layer["feedforward"] = {"part": "mlp", "hidden": hidden, "activation": c.get("activation_function", "gelu")}
        layers[side] = layer | {"wiring": "post"}
        for i in range(c[f"{side}_layers"]):
            ours, theirs = f"{prefix}.layers.{i}", f"model.{side}.layers.{i}"
            for n, branch in enumerate(layer):
                original = {"mixer": "self_attn", "cross": "encoder_attn", "feedforward": "final"}[branch]
                names |= pair(f"{ours}.wiring.norms.{n}.inner", f"{theirs}.{original}_layer_norm")
                if branch != "feedforward":
                    for letter in ("q", "k", "v", "out"):
                        names |= pair(f"{ours}.branches.{branch}.{letter}", f"{theirs}.{original}.{letter}_proj")
            names |= pair(f"{ours}.branches.feedforward.into", f"{theirs}.fc1")
            names |= pair(f"{ours}.branches.feedforward.out", f"{theirs}.fc2")
    names |= {
        "source_embed.table": "model.shared.weight",
        "embed.position.table": "model.decoder.embed_positions.weight",
    }
    names |= pair("embed.norm.inner", "model.decoder.layernorm_embedding")
    inside = "encoder.layers.0.branches.mixer"
    names |= pair(f"{inside}.norm.inner", "model.encoder.layernorm_embedding")
    names[f"{inside}.position.table"] = "model.encoder.embed_positions.weight"
    reader = {"part": "windows", "size": window, "overlap": overlap, "position": places, "norm": "layer"}
    reader |= {"layers": c["encoder_layers"], "layer": [layers["encoder"]], "heads": heads["encoder"]}
    tokens = {"part": "tokens", "scale": c.get("scale_embedding", False)}
    table = {"kind": "encoder-decoder", "width": c["d_model"], "tie": "all"}
    table |= {"head": {"part": "vocabulary", "bias": True}}
    table["encoder"] = {"depth": 1, "embed": tokens, "layer": [{"mixer": reader, "wiring": "plain"}]}
    embed = tokens | {"position": places, "norm": "layer"}
    table["decoder"] = {"depth": c["decoder_layers"], "embed": embed, "layer": [layers["decoder"]]}
    table["decoder"]["heads"] = heads["decoder"]
    return build({"model": table}, vocab=c["vocab_size"]), names


def crate(golden: Golden) -> list[Finding]:
    c = golden.config
    image, width = golden.input("img"), c["dim"]
    channels, patch = image.shape[1], c["patch_size"]
    embed = {"part": "patches", "image": c["image_size"], "patch": patch, "channels": channels}
    mixer = {"part": "subspace", "dim": c["dim_head"], "pattern": "everything"}
    layer = {"mixer": mixer, "feedforward": {"part": "ista", "step": c["ista"], "sparsity": c["lambd"]}}
    model = build(
        {
            "model": {
                "kind": "encoder",
                "width": width,
                "heads": c["heads"],
                "depth": c["depth"],
                "norm": "layer",
                "embed": embed | {"before": "layer", "after": "layer"},
                "head": {"part": "classify", "classes": c["num_classes"], "pool": "first"},
                "layer": [layer | {"wiring": "crate"}],
            }
        },
        vocab=1,
    )

    def ours_first(w: Tensor) -> Tensor:
        """Their patches are rows, columns, channels; ours are channels, rows, columns."""
        return w.unflatten(-1, (patch, patch, channels)).movedim(-1, -3).flatten(-3)

    names = {
        "embed.token": lambda w: w("cls_token")[0, 0],
        "embed.position.table": lambda w: w("pos_embedding")[0],
        "embed.before.inner.weight": lambda w: ours_first(w("to_patch_embedding.1.weight")),
        "embed.before.inner.bias": lambda w: ours_first(w("to_patch_embedding.1.bias")),
        "embed.into.weight": lambda w: ours_first(w("to_patch_embedding.2.weight")),
        "embed.into.bias": "to_patch_embedding.2.bias",
    }
    names |= pair("embed.after.inner", "to_patch_embedding.3")
    names |= pair("stack.norm.inner", "mlp_head.0") | pair("head.out", "mlp_head.1")
    for i in range(c["depth"]):
        ours, theirs = f"stack.layers.{i}", f"transformer.layers.{i}"
        names |= {f"{ours}.branches.mixer.into.weight": f"{theirs}.0.fn.qkv.weight"}
        names |= {f"{ours}.branches.feedforward.dictionary": f"{theirs}.1.fn.weight"}
        names |= pair(f"{ours}.branches.mixer.attention.out", f"{theirs}.0.fn.to_out.0")
        for n in range(2):
            names |= pair(f"{ours}.wiring.norms.{n}.inner", f"{theirs}.{n}.norm")
    golden.load(model, names)
    with watch(model, "*.0.wiring.between") as half, watch(model, "*.0.out") as out:
        logits = model(image)
    inside = {"half1": half["stack.layers.0.wiring.between"][0], "layer1": out["stack.layers.0.out"][0]}
    first = model.embed(image, Context.begin(*model.embed.extent(image)))
    return golden.compare({"logits": logits, "embed": first, **inside})


def involution(golden: Golden) -> list[Finding]:
    """Over images. With a stride, which a mixer does not have, kernels are made from the mean of each patch."""
    c = golden.config
    x = golden.input("x")
    height, width = x.shape[2:]
    mixer = Involution(
        width=c["channels"],
        size=c["kernel_size"],
        group=c["group_channels"],
        reduction=c["reduction_ratio"],
        norm="batch",
        causal=False,
        columns=width,
    ).eval()
    names = {
        "reduce.weight": lambda w: w("conv1.conv.weight")[..., 0, 0],
        "norm.weight": "conv1.bn.weight",
        "norm.bias": "conv1.bn.bias",
        "norm.mean": "conv1.bn.running_mean",
        "norm.var": "conv1.bn.running_var",
        "span.weight": lambda w: w("conv2.conv.weight")[..., 0, 0],
        "span.bias": "conv2.conv.bias",
    }
    golden.load(mixer, names)
    stride = c["stride"]
    if stride == 1:
        y = mixer(x.flatten(2).mT, Context.begin(len(x), height * width)).mT.unflatten(2, (height, width))
    else:
        means = F.avg_pool2d(x, stride)
        y = apply_kernels(square_windows(x, c["kernel_size"], stride), mixer.kernels(means.flatten(2).mT))
        y = y.mT.unflatten(2, means.shape[2:])
    return golden.compare({"out": y})


CASES = {
    "involution": involution,
    "crate": crate,
    "unlimiformer": unlimiformer,
    "gau": gau,
    "gau_causal": gau,
    "flash": flash,
    "flash_causal": flash,
}
