"""Decoders that write all tokens at once: fairseq's NAT, CMLM and CRF, and the fork of GLAT.

They write the start token on the canvas, too, and their padding has a vector of its own, which hooks put in its place
here: outputs at padding are compared as well.
"""

import torch
from torch import Tensor

from regard import build
from regard.core import BLANK, Model, source_lengths
from regard.decode import DecodeConfig
from regard.decode.canvas import Canvas, Marks
from regard.decode.mask_predict import mask_predict
from regard.ops import crf
from regard.verify.golden import Golden
from regard.verify.laws import Finding

START, PAD, END, UNKNOWN = 0, 1, 2, 3
TABLE = "encoder.embed_tokens.weight"


def model_of(golden: Golden, **model: object) -> Model:
    """Build the model of a sidecar and load its weights."""
    c = {key: int(value) if str(value).isdigit() else str(value) == "True" for key, value in golden.config.items()}
    learned = c["encoder_learned_pos"]

    def position(side: str, most: str) -> dict:
        if learned:
            return {"part": "learned", "length": len(golden.weight(f"{side}.embed_positions.weight")) - 2}
        return {"part": "sinusoidal", "layout": "halves", "offset": 2, "spread": "ends"}

    def layer(side: str) -> dict:
        wiring = "pre" if c[f"{side}_normalize_before"] else "post"
        cross = {"cross": {"part": "attention", "over": "memory"}} if side == "decoder" else {}
        hidden = {"part": "mlp", "hidden": c[f"{side}_ffn_embed_dim"]}
        return {
            "mixer": {"part": "attention", "pattern": "everything"},
            **cross,
            "feedforward": hidden,
            "wiring": wiring,
        }

    def stack(side: str, embed: str, **more: object) -> dict:
        norm = "layer" if c[f"{side}_normalize_before"] else "none"
        made = {"part": embed, "scale": not learned, "position": position(side, ""), **more}
        return {"depth": c[f"{side}_layers"], "layer": [layer(side)], "norm": norm, "embed": made}

    copy = "attention" if "w.decoder.copy_attn.weight" in golden else "uniform" if c["src_embedding_copy"] else "none"
    table = {
        "kind": "encoder-decoder", "width": c["encoder_embed_dim"], "heads": c["encoder_attention_heads"], "tie": "all",
        "encoder": stack("encoder", "tokens"), "decoder": stack("decoder", "canvas", copy=copy),
        "length": {"part": "classifier", "classes": len(golden.weight("decoder.embed_length.weight")),
                   "offset": c["pred_length_offset"]},
    } | model  # fmt: skip
    made = build({"model": table}, vocab=len(golden.weight(TABLE))).eval()
    if copy == "none":  # there the blank is the unknown token
        del made.embed._parameters["blank"]
        made.embed.blank = made.embed.table[UNKNOWN]
    names: dict = {"embed.table": TABLE, "length.table": "decoder.embed_length.weight"}
    if copy == "attention":
        names["embed.ask.weight"] = "decoder.copy_attn.weight"
    if learned:
        for ours, theirs in (("source_embed", "encoder"), ("embed", "decoder")):
            names[f"{ours}.position.table"] = lambda w, theirs=theirs: w(f"{theirs}.embed_positions.weight")[2:]
    if table.get("head"):
        names |= {"head.left": "crf_layer.E1.weight", "head.right": "crf_layer.E2.weight"}
    for ours, theirs in (("encoder", "encoder"), ("stack", "decoder")):
        if f"w.{theirs}.layer_norm.weight" in golden:
            names |= both(f"{ours}.norm.inner", f"{theirs}.layer_norm")
        branches = {"mixer": "self_attn", **({"cross": "encoder_attn"} if theirs == "decoder" else {})}
        for i in range(c[f"{theirs}_layers"]):
            for at, (branch, original) in enumerate(branches.items()):
                for letter in ("q", "k", "v", "out"):
                    mine = f"{ours}.layers.{i}.branches.{branch}.{letter}"
                    names |= both(mine, f"{theirs}.layers.{i}.{original}.{letter}_proj")
                names |= both(
                    f"{ours}.layers.{i}.wiring.norms.{at}.inner", f"{theirs}.layers.{i}.{original}_layer_norm"
                )
            names |= both(f"{ours}.layers.{i}.branches.feedforward.into", f"{theirs}.layers.{i}.fc1")
            names |= both(f"{ours}.layers.{i}.branches.feedforward.out", f"{theirs}.layers.{i}.fc2")
            last = f"{ours}.layers.{i}.wiring.norms.{len(branches)}.inner"
            names |= both(last, f"{theirs}.layers.{i}.final_layer_norm")
    golden.load(made, names)
    return made


def both(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}


def run(golden: Golden, model: Model, tokens: Tensor, padding: Tensor | None = None) -> tuple[Tensor, object]:
    """Return hidden vectors' logits (batch, n, vocab) of a canvas, and the memory. padding: its vector in the decoder;
    None: the embedding of the padding token."""
    source, prev = golden.input("src"), golden.input("prev")
    model.source_embed.register_forward_hook(lambda _, given, x: x.masked_fill((given[0] == PAD)[..., None], 0.0))
    memory = model.encode(source, source != PAD)
    vector = model.embed.table[PAD].detach() * model.embed.scale if padding is None else padding
    model.embed.register_forward_hook(lambda _, given, x: torch.where((prev == PAD)[..., None], vector, x))
    return model(tokens, valid=prev != PAD, memory=memory), memory


def vanilla(golden: Golden) -> list[Finding]:
    """At padding the decoder reads the first source token."""
    model = model_of(golden)
    prev, tgt = golden.input("prev"), golden.input("tgt")
    first = model.embed.table[golden.input("src")[:, :1]] * model.embed.scale
    logits, memory = run(golden, model, torch.full_like(prev, BLANK), first)
    lengths = (tgt != PAD).sum(1)
    classes = lengths - model.length.first(source_lengths(memory))
    encoder = {"encoder_out": memory.x.transpose(0, 1)}
    found = golden.compare(
        {"word_logits": logits, "length_logits": model.length.logits(memory), "length_target": classes, **encoder}
    )
    best = model.length.candidates(memory, 1).lengths[:, 0].clamp(min=2)
    return [*found, equal(golden, "greedy length", best, golden.extra("pred_length_greedy"))]


def cmlm(golden: Golden) -> list[Finding]:
    model = model_of(golden)
    prev = golden.input("prev")
    logits, memory = run(golden, model, torch.where(prev == UNKNOWN, BLANK, prev))
    found = golden.compare({"word_logits": logits, "length_logits": model.length.logits(memory)})
    begin = golden.extra("mp_init")
    canvas = Canvas(torch.where(begin == UNKNOWN, BLANK, begin), begin != PAD, torch.zeros(len(begin)), memory)
    history = golden.extra("mp_history")[::2]  # every other one is before tokens are blanked
    seen = list(mask_predict(model, canvas, Marks(PAD, START, END), DecodeConfig(iterations=len(history))))
    for number, (mine, wanted) in enumerate(zip(seen, history, strict=True)):
        written = mine.tokens.masked_fill(~mine.valid, PAD)
        found.append(equal(golden, f"canvas {number}", written, wanted))
    return found


def with_crf(golden: Golden) -> list[Finding]:
    head = {"part": "crf", "rank": golden.config["crf_lowrank_approx"], "candidates": golden.config["crf_beam_approx"]}
    model = model_of(golden, head=head)
    prev, targets = golden.input("prev"), golden.input("tgt")
    logits, memory = run(golden, model, torch.where(prev == UNKNOWN, BLANK, prev))
    valid = targets != PAD
    score = crf.log_likelihood(logits, model.head.left, model.head.right, targets, model.head.candidates, valid)
    nll = -(score / valid.sum(1)).mean()[None]
    return golden.compare({"word_logits": logits, "length_logits": model.length.logits(memory), "crf_nll": nll})


def crf_alone(golden: Golden) -> list[Finding]:
    left, right = (torch.nn.Parameter(golden.weight(f"E{i}.weight").clone()) for i in (1, 2))
    module = torch.nn.ParameterDict({"left": left, "right": right})
    golden.load(module, {"left": "E1.weight", "right": "E2.weight"})
    left, right = module["left"], module["right"]
    emissions, targets, valid = (golden.input(name) for name in ("emissions", "targets", "masks"))
    vocab, few = golden.config["num_embedding"], golden.config["beam_size"]
    ours = {
        f"loglik_{name}": crf.log_likelihood(emissions, left, right, targets, count, valid)
        for name, count in (("beam", few), ("full", vocab))
    }
    found = golden.compare(ours)
    for name, count in (("viterbi", few), ("viterbi_full", vocab)):
        tokens = crf.candidates(emissions, count)
        best, _ = crf.viterbi(emissions.gather(2, tokens), crf.transitions(left, right, tokens), valid)
        said = tokens.gather(2, best[..., None])[..., 0]
        found.append(equal(golden, name, said[valid], golden.extra(f"{name}_tokens")[valid]))
    return found


def glat(golden: Golden) -> list[Finding]:
    """Positions are added before every layer there, and padding has a position, too."""
    model = model_of(golden)
    prev, targets = golden.input("prev"), golden.input("tgt")
    shown = (golden.output("glat_tgt") == PAD) & (targets != PAD)
    at = torch.arange(prev.shape[1])[None]
    positions = model.embed.position.embed(torch.zeros(1, prev.shape[1], model.width), at)
    of_padding = golden.weight("decoder.embed_positions.weight")[PAD]
    positions = torch.where((prev == PAD)[..., None], of_padding, positions)
    for layer in list(model.stack.layers)[1:]:
        layer.register_forward_pre_hook(lambda _, given: (given[0] + positions, *given[1:]))
    blank = torch.where(prev == UNKNOWN, BLANK, prev)
    padding = model.embed.table[PAD].detach() + of_padding
    first, memory = run(golden, model, blank, padding)
    second = model(torch.where(shown, targets, blank), valid=prev != PAD, memory=memory)
    found = golden.compare({"glanced_logits": second, "length_logits": model.length.logits(memory)})
    return [*found, *golden.compare({"first_pass_logits": first.detach()}, gradients=False)]


def equal(golden: Golden, what: str, ours: Tensor, wanted: Tensor) -> Finding:
    return Finding(f"{golden.system}-{golden.variant} {what}", float((ours != wanted).sum()), 0.0)


CASES = {"nat_vanilla": vanilla, "nat_cmlm": cmlm, "nat_crf": with_crf, "dynamic_crf": crf_alone, "glat": glat}
