"""Memory across segments: the authors' Transformer-XL, lucidrains' Infini-attention, the
authors' Recurrent Memory Transformer over Hugging Face's GPT-2, and the authors' YOCO."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Context, Model, Norm, Position, build, part
from regard.ops.rotary import rotate
from regard.parts.mixers.infini import Infini
from regard.verify.golden import Golden
from regard.verify.laws import Finding

Names = dict[str, object]


def cut(model: Model, tokens: Tensor, sizes: tuple[int, ...] = (1, 3, 2, 7)) -> Tensor:
    """The same scores in steps of several sizes."""
    state, scores, begin = model.start(*tokens.shape), [], 0
    while begin < tokens.shape[1]:
        size = sizes[len(scores) % len(sizes)]
        some, state = model.step(tokens[:, begin : begin + size], state)
        scores.append(some)
        begin += size
    return torch.cat(scores, 1)


def xl_segments(model: Model, data: Tensor, memory: int) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """(batch, time) tokens of each segment -> its vectors, and the last inputs of every layer and the output.

    The authors let no gradient into the memory, to save work; ours finds its way back through all segments of a batch.
    To compare gradients, the layers are called here as the authors call theirs, on [memory without gradient; segment].
    """
    size, kept = data.shape[2], [torch.empty(0)] * (len(model.stack.layers) + 1)
    for index, tokens in enumerate(data):
        begin = index * size
        x = model.embed(tokens, Context(torch.arange(begin, begin + size).expand_as(tokens)))
        kept = [m if m.numel() else x[:, :0] for m in kept]
        seen = []
        for layer, old in zip(model.stack.layers, kept, strict=False):
            seen.append(torch.cat((old.detach(), x), 1))
            at = torch.arange(begin - old.shape[1], begin + size).expand(len(x), -1)
            x = layer(seen[-1], Context(at))[:, old.shape[1] :]
        seen.append(torch.cat((kept[-1].detach(), x), 1))
        kept = [m[:, m.shape[1] - min(memory, m.shape[1]) :] for m in seen]
        yield x, kept


def transformer_xl(golden: Golden) -> list[Finding]:
    data, target = (golden.input(name).transpose(1, 2) for name in ("data", "target"))  # (segments, batch, time)
    model = golden.convert(golden.config | {"model_type": "transfo-xl"})
    outputs: dict[str, Tensor] = {}

    def add(index: int, x: Tensor) -> None:
        outputs[f"hidden_seg{index}"] = x.transpose(0, 1)
        scores = model.head(x, Context.begin(*x.shape[:2]))
        outputs[f"nll_seg{index}"] = F.cross_entropy(scores.mT, target[index], reduction="none").T

    made = list(xl_segments(model, data, golden.config["mem_len"]))
    for index, (x, _) in enumerate(made):
        add(index, x)
    findings = golden.compare(outputs | {f"mem{i}": m.transpose(0, 1) for i, m in enumerate(made[-1][1])})
    tokens = data.transpose(0, 1).flatten(1)
    with torch.no_grad():
        for scores in (model(tokens), cut(model, tokens)):
            nll = F.cross_entropy(scores.mT, target.transpose(0, 1).flatten(1), reduction="none")
            parts = nll.split(data.shape[2], 1)
            findings += golden.compare({f"nll_seg{i}": part.T for i, part in enumerate(parts)}, gradients=False)
    return findings


class Turned(Position):
    """Rotary positions whose speeds are weights, since the golden has a gradient for them; ours are fixed. The original
    keeps its angles after the first call, without their gradient: it reaches the queries of the first segment only."""

    def __init__(self, dim: int):
        super().__init__()
        self.rates = nn.Parameter(torch.empty(dim // 2))
        self.called = False

    def query(self, q: Tensor, at: Tensor) -> Tensor:
        turned = _turned(q, at, self.rates.detach() if self.called else self.rates)
        self.called = True
        return turned

    def key(self, k: Tensor, at: Tensor) -> Tensor:
        return _turned(k, at, self.rates.detach())


def _turned(x: Tensor, at: Tensor, rates: Tensor) -> Tensor:
    angle = at[:, None, :, None] * rates
    return rotate(x, angle.cos(), angle.sin(), "interleaved")


def infini_names(here: str, there: str) -> Names:
    """Theirs weighs the local part by sigmoid(gate), the paper and ours the memory: beta = -gate."""
    names: Names = {
        f"{here}out.weight": f"{there}to_out.weight",
        f"{here}position.rates": f"{there}rotary_emb.freqs",
        f"{here}beta": lambda w: -w(f"{there}fastweight_mem.head_gates"),
    }
    for j, ours in enumerate("qkv"):
        names[f"{here}{ours}.weight"] = lambda w, j=j: w(f"{there}to_qkv.weight").chunk(3)[j]
    return names


def infini_table(config: dict) -> dict:
    update = "delta" if config["use_mem_delta_rule"] else "linear"
    return {"dim": config["dim_head"], "segment": config["segment"], "update": update}


def in_segments(y: Tensor, segment: int, name: str) -> dict[str, Tensor]:
    return {f"{name}_seg{i}": part for i, part in enumerate(y.split(segment, 1))}


def infini_attn(golden: Golden) -> list[Finding]:
    c, x = golden.config, golden.input("x")
    mixer = Infini(c["dim"], c["heads"], position=Turned(c["dim_head"]), **infini_table(c))
    both = nn.ModuleDict({"norm": part(Norm, {"part": "rms", "eps": 1e-12}, width=c["dim"]), "mixer": mixer})
    golden.load(both, infini_names("mixer.", "") | {"norm.inner.weight": "norm.gamma"})

    def run(x: Tensor, sizes: list[int]) -> dict[str, Tensor]:
        state, outputs = mixer.start(Context.begin(len(x), 0), x.shape[1]), []
        at = torch.zeros(len(x), dtype=torch.long)
        for piece in both["norm"](x).split(sizes, 1):
            y, state = mixer.step(piece, state, Context.after(at, piece.shape[1]))
            outputs.append(y)
            at = at + piece.shape[1]
        last = (x.shape[1] - 1) % c["segment"] + 1  # positions of the last segment, which the original has taken up too
        memory = mixer.absorb(state._replace(keys=state.keys[:, :last], values=state.values[:, :last]))
        y = in_segments(torch.cat(outputs, 1), c["segment"], "out")
        return y | {"kv_mem": memory[..., :-1], "k_norm": memory[..., -1]}

    findings = golden.compare(run(x, [x.shape[1]]))
    with torch.no_grad():
        return findings + golden.compare(run(x, [1, 4, x.shape[1] - 5]), gradients=False)


def infini_transformer(golden: Golden) -> list[Finding]:
    c, tokens = golden.config, golden.input("tokens")
    rms = {"part": "rms", "eps": 1e-12}
    hidden = int(c["dim"] * c["ff_mult"] * 2 / 3)
    layer = {
        "mixer": {"part": "infini", **infini_table(c)},
        "feedforward": {"part": "glu", "hidden": hidden, "activation": "gelu", "bias": True},
        "wiring": {"part": "pre", "norm": rms},
    }
    table = {
        "kind": "decoder",
        "width": c["dim"],
        "heads": c["heads"],
        "depth": c["depth"],
        "norm": rms,
        "embed": {"part": "tokens", "scale": False},
        "head": {"part": "vocabulary", "bias": True},
        "layer": [layer],
    }
    model = build({"vocab": c["num_tokens"], "model": table})
    names: Names = {"embed.table": "token_emb.weight", "stack.norm.inner.weight": "norm.gamma"}
    names |= {"head.table": "to_logits.weight", "head.bias": "to_logits.bias"}
    for i, layer in enumerate(model.stack.layers):
        layer.branches["mixer"].position = Turned(c["dim_head"])
        here, there = f"stack.layers.{i}", f"layers.{i}"
        names |= infini_names(f"{here}.branches.mixer.", f"{there}.0.")
        for j in (0, 1):
            names[f"{here}.wiring.norms.{j}.inner.weight"] = f"{there}.{j}.norm.gamma"
        for kind in ("weight", "bias"):
            for j, ours in enumerate(("into", "gate")):
                names[f"{here}.branches.feedforward.{ours}.{kind}"] = lambda w, n=f"{there}.1.proj_in.{kind}", j=j: w(
                    n
                ).chunk(2)[j]
            names[f"{here}.branches.feedforward.out.{kind}"] = f"{there}.1.proj_out.{kind}"
    golden.load(model, names)
    findings = golden.compare(in_segments(model(tokens), c["segment"], "logits"))
    with torch.no_grad():
        return findings + golden.compare(in_segments(cut(model, tokens), c["segment"], "logits"), gradients=False)


def rmt_model(golden: Golden) -> Model:
    c, gpt = golden.config, golden.config["gpt2"]
    width = gpt["n_embd"]
    norm = {"part": "layer", "eps": gpt["layer_norm_epsilon"]}
    bend = {"gelu_new": "gelu_tanh"}.get(gpt["activation_function"], gpt["activation_function"])
    layer = {
        "mixer": "attention",
        "feedforward": {"part": "mlp", "hidden": gpt["n_inner"] or 4 * width, "activation": bend},
        "wiring": {"part": "pre", "norm": norm},
    }
    memory = {
        "part": "recurrent_memory",
        "depth": gpt["n_layer"],
        "segment": c["segment_size"],
        "memory": c["num_mem_tokens"],
        "norm": norm,
        "position": {"part": "learned", "length": gpt["n_positions"]},
        "layer": [layer],
    }
    table = {
        "kind": "decoder",
        "width": width,
        "heads": gpt["n_head"],
        "tie": "target",
        "embed": {"part": "tokens", "scale": False},
        "layer": [{"mixer": memory, "wiring": "plain"}],
    }
    model = build({"vocab": gpt["vocab_size"], "model": table})
    ours, theirs = "stack.layers.0.branches.mixer", "memory_cell.model.transformer"
    names: Names = {
        "embed.table": f"{theirs}.wte.weight",
        f"{ours}.memory": "memory_cell.memory",
        f"{ours}.position.table": f"{theirs}.wpe.weight",
    }
    for kind in ("weight", "bias"):
        names[f"{ours}.stack.norm.inner.{kind}"] = f"{theirs}.ln_f.{kind}"
        for i in range(gpt["n_layer"]):
            here, there = f"{ours}.stack.layers.{i}", f"{theirs}.h.{i}"
            names[f"{here}.wiring.norms.0.inner.{kind}"] = f"{there}.ln_1.{kind}"
            names[f"{here}.wiring.norms.1.inner.{kind}"] = f"{there}.ln_2.{kind}"
            for j, letter in enumerate("qkv"):  # Hugging Face's Conv1D holds its weight as (in, out)
                names[f"{here}.branches.mixer.{letter}.{kind}"] = lambda w, n=f"{there}.attn.c_attn.{kind}", j=j: (
                    w(n).chunk(3, -1)[j].t()
                )
            for mine, other in (
                ("mixer.out", "attn.c_proj"),
                ("feedforward.into", "mlp.c_fc"),
                ("feedforward.out", "mlp.c_proj"),
            ):
                names[f"{here}.branches.{mine}.{kind}"] = lambda w, n=f"{there}.{other}.{kind}": w(n).t()
    golden.load(model, names)
    return model


def rmt(golden: Golden) -> list[Finding]:
    model, tokens = rmt_model(golden), golden.input("input_ids")
    (batch, time), segment = tokens.shape, golden.config["segment_size"]
    mixer = model.stack.layers[0].branches["mixer"]

    def by_segments() -> dict[str, Tensor]:
        """A step for each, and the memory as it is written after it."""
        state, scores, outputs = model.start(batch, time), [], {}
        for index, piece in enumerate(tokens.split(segment, 1)):
            some, state = model.step(piece, state)
            scores.append(some)
            filled = torch.full((batch,), piece.shape[1])
            carried = state.layers[0][0]
            written = mixer.write(carried, filled, filled > 0)
            outputs[f"memory_after_seg{index}"] = written
        return outputs | {"logits": torch.cat(scores, 1)}

    findings = golden.compare(by_segments())
    with torch.no_grad():
        for logits in (model(tokens), cut(model, tokens)):
            findings += golden.compare({"logits": logits}, gradients=False)
    return findings


def yoco_rotary(config: dict, heads: int) -> dict:
    """Their last pair turns at exactly 1 / theta: speeds theta^(-i / (pairs - 1)), which is another base."""
    count = config["dim"] // heads // 2
    base = config.get("rope_theta", 10000.0) ** (count / max(count - 1, 1))
    return {"part": "rotary", "layout": "interleaved", "base": base}


def yoco_model(golden: Golden) -> Model:
    c = golden.config
    rms = {"part": "rms", "eps": c.get("norm_eps", 1e-5)}
    turned = yoco_rotary(c, c["n_self_heads"])
    if c["sliding_window"] is None:
        mixer = {"part": "gated_retention", "position": turned, "head_norm": {**rms, "gain": False}}
    else:
        window = f"causal & window({c['sliding_window']})"
        mixer = {"part": "attention", "pattern": window, "bias": False, "position": turned}
    rest = {"feedforward": {"part": "glu", "hidden": c["hidden_dim"]}, "wiring": {"part": "pre", "norm": rms}}
    both = {
        "part": "yoco",
        "heads": c["n_attn_heads"],
        "kv_heads": c["n_attn_kv_heads"],
        "norm": rms,
        "position": yoco_rotary(c, c["n_attn_heads"]),
        "first": {"heads": c["n_self_heads"], "depth": c["n_layers"] // 2, "layer": [{"mixer": mixer, **rest}]},
        "second": {"depth": c["n_layers"] // 2, "layer": [rest]},
    }
    table = {"kind": "decoder", "width": c["dim"], "norm": rms, "layer": [{"mixer": both, "wiring": "plain"}]}
    model = build({"vocab": c["vocab_size"], "model": table})
    ours = "stack.layers.0.branches.mixer"
    names: Names = {
        "embed.table": "embed_tokens.weight",
        "head.table": "output_projection.weight",
        "stack.norm.inner.weight": "layer_norm.weight",
        f"{ours}.norm.inner.weight": "cross_decoder.kv_layer_norm.weight",
        f"{ours}.k.weight": "cross_decoder.k_proj.weight",
        f"{ours}.v.weight": "cross_decoder.v_proj.weight",
    }
    gates = {"gate": "g_proj", "fade": "gt_proj"} if c["sliding_window"] is None else {}
    of_first = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "out_proj", **gates}
    of_second = {"attention.q": "q_proj", "attention.out": "out_proj"}
    for side, stack, maps in (("self_decoder", "first", of_first), ("cross_decoder", "second", of_second)):
        for i in range(c["n_layers"] // 2):
            here, there = f"{ours}.{stack}.layers.{i}", f"{side}.layers.{i}"
            names |= {f"{here}.branches.mixer.{a}.weight": f"{there}.mixer.{b}.weight" for a, b in maps.items()}
            for a, b in (("into", "gate"), ("gate", "fc1"), ("out", "fc2")):  # theirs bends fc1
                names[f"{here}.branches.feedforward.{a}.weight"] = f"{there}.ffn.{b}.weight"
            names[f"{here}.wiring.norms.0.inner.weight"] = f"{there}.mixer_layer_norm.weight"
            names[f"{here}.wiring.norms.1.inner.weight"] = f"{there}.final_layer_norm.weight"
    golden.load(model, names)
    return model


def yoco(golden: Golden) -> list[Finding]:
    model, tokens = yoco_model(golden), golden.input("tokens")
    context = Context.begin(*tokens.shape)
    first = model.stack.layers[0].branches["mixer"].first
    outputs = {"logits": model(tokens), "self_decoder_out": first(model.embed(tokens, context), context)}
    findings = golden.compare(outputs)
    with torch.no_grad():
        return findings + golden.compare({"logits": cut(model, tokens)}, gradients=False)


CASES = {
    "yoco_swa": yoco,
    "yoco_gret": yoco,
    "rmt": rmt,
    "transformer_xl": transformer_xl,
    "transformer_xl_preln": transformer_xl,
    "infini_attn": infini_attn,
    "infini_attn_delta": infini_attn,
    "infini_transformer": infini_transformer,
}
