"""Systems with a state of fixed size: RWKV-4 (Hugging Face), S4 and S4D (state-spaces), Performer (lucidrains)."""

import torch

from regard.bases.favor import Favor, Seen
from regard.bases.state_space import StateSpace
from regard.core import Context, build, watch
from regard.ops.fading import split_heads
from regard.parts.mixers.performer import Performer
from regard.parts.mixers.s4 import S4
from regard.parts.mixers.s4d import S4d
from regard.verify.golden import Golden, in_steps
from regard.verify.laws import Finding, Subject, in_random_steps, max_difference


def pair(ours: str, theirs: str) -> dict:
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}


def rwkv4(golden: Golden) -> list[Finding]:
    """The first block's extra norm is the embedding's. Their hidden states begin with the first block's output, and
    end with the normed one."""
    c = golden.config
    norm, depth = {"part": "layer", "eps": c["layer_norm_epsilon"]}, c["num_hidden_layers"]
    halved = bool(c["rescale_every"]) and depth >= c["rescale_every"]
    assert not halved, "this golden's stream is halved on the way, for half precision alone"
    model = build(
        {
            "model": {
                "kind": "decoder",
                "width": c["hidden_size"],
                "depth": depth,
                "norm": norm,
                "tie": "target" if c["tie_word_embeddings"] else "none",
                "embed": {"part": "tokens", "scale": False, "norm": norm},
                "layer": {
                    "mixer": {"part": "rwkv4", "hidden": c["attention_hidden_size"] or c["hidden_size"]},
                    "feedforward": {"part": "channel_mix", "hidden": c["intermediate_size"] or 4 * c["hidden_size"]},
                    "wiring": {"part": "pre", "norm": norm},
                },
            }
        },
        vocab=c["vocab_size"],
    )
    names = {"embed.table": "rwkv.embeddings.weight"} | pair("embed.norm.inner", "rwkv.blocks.0.pre_ln")
    names |= pair("stack.norm.inner", "rwkv.ln_out")
    if not c["tie_word_embeddings"]:
        names["head.table"] = "head.weight"
    for i in range(depth):
        ours, theirs = f"stack.layers.{i}", f"rwkv.blocks.{i}"
        mixer, feed = f"{ours}.branches.mixer", f"{ours}.branches.feedforward"
        names |= pair(f"{ours}.wiring.norms.0.inner", f"{theirs}.ln1")
        names |= pair(f"{ours}.wiring.norms.1.inner", f"{theirs}.ln2")
        names |= {
            f"{mixer}.decay": f"{theirs}.attention.time_decay",
            f"{mixer}.bonus": f"{theirs}.attention.time_first",
        }
        words = {"r": "receptance", "k": "key", "v": "value"}
        names |= {f"{mixer}.{letter}.weight": f"{theirs}.attention.{word}.weight" for letter, word in words.items()}
        names[f"{mixer}.out.weight"] = f"{theirs}.attention.output.weight"
        inner = {"into": "key", "out": "value", "gate": "receptance"}
        names |= {f"{feed}.{one}.weight": f"{theirs}.feed_forward.{word}.weight" for one, word in inner.items()}
        mixes = {f"{mixer}.mix_{letter}": f"{theirs}.attention.time_mix_{word}" for letter, word in words.items()}
        mixes |= {f"{feed}.mix_{one}": f"{theirs}.feed_forward.time_mix_{inner[one]}" for one in ("into", "gate")}
        names |= {one: lambda w, other=other: w(other).flatten() for one, other in mixes.items()}
    golden.load(model, names)
    tokens = golden.input("input_ids")
    with watch(model, "stack.layers.*.out") as seen:
        logits = model(tokens)
    blocks = [seen[f"stack.layers.{i}.out"][0] for i in range(depth)]
    hidden = [*blocks, model.stack.norm(blocks[-1])]
    findings = golden.compare({"logits": logits, "hidden1": hidden[1]})
    return (
        findings + golden.compare({"logits": token_steps(model, tokens)}, gradients=False) + rwkv4_states(golden, model)
    )


def rwkv4_states(golden: Golden, model) -> list[Finding]:
    """Their last states are ours, (batch, width, layers): both inputs before, the sums and their largest exponent."""
    tokens = golden.input("input_ids")
    with torch.no_grad():
        _, state = model.step(tokens, model.start(*tokens.shape))
    layers = [(feed.x, mix.last, mix.sums[:, 0], mix.sums[:, 1], mix.peak) for mix, feed in state.layers]
    ours = [torch.stack(tensors, -1).float() for tensors in zip(*layers, strict=True)]
    theirs = [golden.extra(f"final_state{i}") for i in range(len(ours))]
    return [Finding(f"state {i}", max_difference(*both), 1e-5) for i, both in enumerate(zip(ours, theirs, strict=True))]


def linear_system(golden: Golden, mixer: StateSpace, names: dict) -> list[Finding]:
    """The original is channels first, u (batch, width, time), and its kernel may have a leading 1."""
    golden.load(mixer, names)
    u, kernel = golden.input("u"), golden.output("kernel")
    outputs = {
        "out": mixer(u.mT, Context.begin(u.shape[0], u.shape[2])).mT,
        "kernel": mixer.kernel(kernel.shape[-1]).reshape(kernel.shape),
    }
    findings = golden.compare(outputs)
    return findings + golden.compare({"out": in_steps(mixer, u.mT).mT}, gradients=False)


def diagonal_names() -> dict:
    """Frequencies have the other sign here: of the two halves of the conjugate pairs theirs is the lower."""
    return {
        "log_dt": lambda w: w("kernel.inv_dt").squeeze(-1),
        "log_real": "kernel.A_real",
        "imag": lambda w: -w("kernel.A_imag"),
        "b": lambda w: w("kernel.B")[0],
        "skip": lambda w: w("D")[0],
    }


def plain(c: dict) -> dict:
    return {"width": c["d_model"], "state": c["d_state"], "activation": "identity", "out": "none"}


def s4_diag(golden: Golden) -> list[Finding]:
    c = golden.config
    mixer = S4d(**plain(c), rule=c.get("disc", "zoh"))
    return linear_system(golden, mixer, diagonal_names() | {"c": lambda w: w("kernel.C")[0]})


class Truncated(S4):
    """The original learns C (1 - A_d^L) for the L of its training, and ours C. Here ours is made from theirs, in double
    precision, since 1 - A_d^L is nearly singular."""

    precise = False

    def __init__(self, length: int, **arguments):
        super().__init__(**arguments)
        self.truncated = torch.nn.Parameter(torch.empty_like(self.c))
        self.length = length
        del self.c

    @property
    def exact(self) -> torch.dtype:
        return torch.float64 if self.precise else super().exact

    def system(self):
        self.c, self.precise = self.truncated.clone(), True
        system = super().system()
        (step,) = system.squares(1)
        rest = torch.eye(self.state, dtype=step.dtype) - torch.linalg.matrix_power(step, self.length)
        row = torch.linalg.solve(rest, system.row[:, None], left=False)[:, 0]
        self.precise = False
        system = super().system()
        system.row = row.to(self.exact)
        return system


def s4_dplr(golden: Golden) -> list[Finding]:
    names = diagonal_names() | {"p": lambda w: w("kernel.P")[0], "truncated": lambda w: w("kernel.C")[0]}
    mixer = Truncated(int(golden.weight("kernel.l_kernel")), **plain(golden.config))
    return linear_system(golden, mixer, names)


def s4d_minimal(golden: Golden) -> list[Finding]:
    c = golden.config
    mixer = S4d(c["d_model"], c["d_state"], learn_b=False)
    names = {"log_dt": "kernel.log_dt", "log_real": "kernel.log_A_real", "imag": "kernel.A_imag", "c": "kernel.C"}
    names |= {"skip": "D", "out.bias": "output_linear.0.bias"}
    names["out.weight"] = lambda w: w("output_linear.0.weight").squeeze(-1)
    return linear_system(golden, mixer, names)


def favor(golden: Golden) -> list[Finding]:
    """Queries, keys and values as they are."""
    c = golden.config
    kind, features = feature_of(c), len(golden.weight("projection_matrix"))
    ours = Favor(c["dim_heads"], features, kind, eps=None, seed=0, layer=0, redraw=0)
    golden.load(ours, {"vectors": "projection_matrix"})
    q, k, v = (golden.input(name) for name in "qkv")
    if not c["causal"]:
        return golden.compare({"out": ours.everything(q, k, v)})
    state = theirs_before(ours, k)
    findings = golden.compare({"out": ours.recall(q, k, v, state)[0]})
    with torch.no_grad():
        steps = []
        for piece in zip(*(t.split(3, 2) for t in (q, k, v)), strict=True):
            y, state = ours.recall(*piece, state)
            steps.append(y)
    return findings + golden.compare({"out": torch.cat(steps, 2)}, gradients=False)


def theirs_before(ours: Favor, k: torch.Tensor) -> Seen:
    """Causal, theirs adds 1e-6 to the sum of every feature: ours has that if it begins with so much. Their features of
    softmax are divided by the root of their number, ours not. And theirs divides all keys by the largest of the whole
    sequence, which matters only by their eps: ours, which cannot know it, is told it at the beginning."""
    state = ours.start(k[:, :, 0, 0])
    state.matrix[..., -1] = 1e-6 * (1.0 if state.top is None else ours.features**0.5)
    if state.top is not None:
        state.top.copy_(ours.project(k)[0].detach().amax((-1, -2)))
    return state


def feature_of(c: dict) -> str:
    return "relu" if c.get("generalized_attention") else "softmax"


def performer(golden: Golden) -> list[Finding]:
    """Theirs zeroes the values of padding, but still counts its keys when it divides; so ours is told of no padding,
    and its values are zeroed on the way."""
    c = golden.config
    features = len(golden.weight("fast_attention.projection_matrix"))
    arguments = {"dim": c["dim_head"], "features": features, "feature": feature_of(c), "causal": c["causal"]}
    letters = {letter: f"w.to_{letter}.bias" in golden for letter in ("q", "k", "v", "out")}
    mixer = Performer(c["dim"], c["heads"], **arguments)
    names = {"favor.vectors": "fast_attention.projection_matrix"}
    for letter, biased in letters.items():
        if not biased:
            getattr(mixer, letter).bias = None
        names |= {f"{letter}.{kind}": f"to_{letter}.{kind}" for kind in ("weight", "bias")[: 1 + biased]}
    golden.load(mixer, names)
    x = golden.input("x")
    if "in.mask" in golden:
        mask = golden.input("mask")
        mixer.v.register_forward_hook(lambda _, __, y: y.masked_fill(~mask[..., None], 0.0))
    context = Context.begin(*x.shape[:2])
    if not c["causal"]:
        return golden.compare({"out": mixer(x, context)})
    keys = split_heads(mixer.k(x), c["heads"])
    return golden.compare({"out": mixer.step(x, theirs_before(mixer.favor, keys), context)[0]})


def token_steps(model, x: torch.Tensor, most: int = 5) -> torch.Tensor:
    """The same in random steps; ours are run in double precision."""
    with torch.no_grad():
        return in_random_steps(Subject(model), x, torch.full((len(x),), x.shape[1]), None, max_step=most)


CASES = {
    "rwkv4": rwkv4,
    "s4_diag": s4_diag,
    "s4_dplr": s4_dplr,
    "s4d_minimal": s4d_minimal,
    "performer_selfattn": performer,
} | {f"performer_{kind}{side}": favor for kind in ("softmax", "relu") for side in ("", "_causal")}
