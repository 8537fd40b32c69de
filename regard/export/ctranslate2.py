"""Export a Transformer to CTranslate2: encoder-decoders for its Translator, decoders for its Generator.

CTranslate2 supports multi-head attention with sinusoidal, learned, rotary or ALiBi positions, gated and plain
feed-forwards, and pre-norm and post-norm. Any other part is refused by name, since its output would differ there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import ctranslate2
import numpy as np
import torch
from ctranslate2.specs import common_spec, transformer_spec
from torch import Tensor, nn

from regard.core import Embed, Layer, Mixer, Model, Norm, Stack, UserError
from regard.data import Tokenizer
from regard.schema import name_of
from regard.tasks.run import Run

ACTIVATIONS = {
    "relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "gelu_quick": "GELUSigmoid", "silu": "SWISH",
    "tanh": "Tanh", "sigmoid": "Sigmoid",
}  # fmt: skip
QUANTIZATIONS = ("int8", "int8_float32", "int8_float16", "int16", "float16", "bfloat16", "float32")
MAX_POSITIONS = 4096  # rows of the table for positions without a limit


def write(run: Run, folder: Path, numbers: str | None) -> None:
    if numbers is not None and numbers not in QUANTIZATIONS:
        raise UserError(f"CTranslate2 keeps weights as {', '.join(QUANTIZATIONS)}, not as '{numbers}'")
    model = run.model
    if not isinstance(run, Run) or not isinstance(model, Model):
        _refuse(f"models that do not write texts token by token, and this is a {type(run).__name__}")
    if model.length is not None:
        _refuse("decoders that write all tokens at once")
    if run.target.forced_bos is not None or run.target.extra_ends or run.target.suppressed:
        _refuse("a tokenizer that forces or forbids tokens")
    if model.encoder is None:
        spec: Any = transformer_spec.TransformerDecoderModelSpec(_decoder(model))
        spec.register_vocabulary(_vocabulary(run.target, model.vocab))
    else:
        spec = transformer_spec.TransformerSpec(_encoder(model), _decoder(model))
        spec.register_source_vocabulary(_vocabulary(run.source, model.source_vocab))
        spec.register_target_vocabulary(_vocabulary(run.target, model.vocab))
        spec.config.decoder_start_token = run.target.inner.id_to_token(run.target.start)
        spec.config.add_source_eos = not run.source.adds_special_tokens
    for mark, number in (("bos", run.target.start), ("eos", run.target.end), ("unk", run.target.unk)):
        setattr(spec.config, f"{mark}_token", run.target.inner.id_to_token(number))
    spec.config.layer_norm_epsilon = _epsilon(model)
    spec.validate()
    spec.optimize(quantization=numbers)
    spec.save(str(folder))


def _encoder(model: Model) -> Any:
    stack, embed = model.encoder, model.source_embed
    assert stack is not None
    assert embed is not None
    spec = transformer_spec.TransformerEncoderSpec(
        len(stack.layers), _first_attention(stack).heads, **_common_options(stack, embed)
    )
    _fill_embed(spec, spec.embeddings[0], embed)
    _fill_stack(spec, stack, ("mixer", "feedforward"))
    return spec


def _decoder(model: Model) -> Any:
    crosses = model.encoder is not None
    given = _common_options(model.stack, model.embed)
    position = _first_attention(model.stack).position
    if name_of(position) == "alibi":
        if position.slopes[-1] != 2.0**-8 and len(position.slopes) & (len(position.slopes) - 1) == 0:
            _refuse("slopes of ALiBi that end elsewhere than at 2^-8")
        given |= {"alibi": True, "alibi_use_positive_positions": False}
    spec = transformer_spec.TransformerDecoderSpec(
        len(model.stack.layers), _first_attention(model.stack).heads, with_encoder_attention=crosses, **given
    )
    _fill_embed(spec, spec.embeddings, model.embed)
    _fill_stack(spec, model.stack, ("mixer", *(["cross"] if crosses else []), "feedforward"))
    head: Any = model.head
    if name_of(head) != "vocabulary" or head.into is not None or head.softcap is not None:
        _refuse(f"the head '{name_of(head)}' with a layer of its own or a softcap")
    spec.projection.weight = _array(head.table * head.scale)
    if head.bias is not None:
        spec.projection.bias = _array(head.bias)
    return spec


def _common_options(stack: Stack, embed: Embed) -> dict[str, Any]:
    """Return the options that encoder and decoder have in common."""
    mixer, layer = _first_attention(stack), stack._layers[0]
    feed: Any = layer.branches["feedforward"] if "feedforward" in layer.branches else _refuse("layers without one")
    if name_of(layer.wiring) not in ("pre", "post"):
        _refuse(f"the wiring '{name_of(layer.wiring)}'")
    if name_of(feed) not in ("mlp", "glu") or name_of(feed.norm) != "none":
        _refuse(f"the feed-forward '{name_of(feed)}'" + (" with a norm inside" if name_of(feed) == "mlp" else ""))
    if activation_of(feed) not in ACTIVATIONS:
        _refuse(f"the activation '{activation_of(feed)}'")
    before, last = name_of(layer.wiring) == "pre", name_of(stack.norm)
    if not before and last != "none":
        _refuse("a final norm after post-norm layers")
    given: dict[str, Any] = {
        "pre_norm": before, "no_final_norm": last == "none", "rms_norm": _norm_kind(layer.wiring.norms[0]) == "rms",
        "activation": getattr(common_spec.Activation, ACTIVATIONS[activation_of(feed)]),
        "ffn_glu": name_of(feed) == "glu",
        "layernorm_embedding": name_of(embed.norm) != "none",
    }  # fmt: skip
    if mixer.kv_heads != mixer.heads:
        given["num_heads_kv"] = mixer.kv_heads
    if mixer.dim * mixer.heads != mixer.width:
        given["head_dim"] = mixer.dim
    position = mixer.position
    if name_of(position) == "rotary":
        if position.strength != 1 or name_of(embed.position) != "none":
            _refuse("rotary positions that are scaled, or that come on top of others")
        base = position.rates[1] ** -(position.rotated / 2) if len(position.rates) > 1 else 10000.0
        if not np.allclose(position.rates, [base ** (-2 * i / position.rotated) for i in range(position.rotated // 2)]):
            _refuse("rotary positions that are scaled")
        turned = {"rotary_dim": position.rotated, "rotary_interleave": position.layout == "interleaved"}
        given |= turned | {"rotary_base": base}
    elif name_of(position) not in ("none", "alibi"):
        _refuse(f"the position '{name_of(position)}' in attention")
    return given


def activation_of(feed: Any) -> str:
    """Return the name of a feed-forward's activation."""
    from regard.ops.activation import ACTIVATIONS

    return next(name for name, activation_name in ACTIVATIONS.items() if activation_name is feed.activate)


def _fill_embed(spec: Any, table: Any, embed: Any) -> None:
    if name_of(embed) != "tokens" or not isinstance(embed.up, nn.Identity):
        _refuse(f"the embed '{name_of(embed)}', or one narrower than the model")
    table.weight = _array(embed.table)
    spec.scale_embeddings = embed.scale != 1
    if embed.position.acts("embed"):
        places = min(embed.position.limit or MAX_POSITIONS, MAX_POSITIONS)
        nothing = torch.zeros(1, places, embed.dim)
        spec.position_encodings.encodings = _array(embed.position.embed(nothing, torch.arange(places)[None])[0])
    elif hasattr(spec, "position_encodings"):
        spec.position_encodings.encodings = np.zeros((MAX_POSITIONS, embed.dim), dtype=np.float32)
    if name_of(embed.norm) != "none":
        _fill_norm(spec.layernorm_embedding, embed.norm)


def _fill_stack(spec: Any, stack: Stack, wanted: tuple[str, ...]) -> None:
    kinds = {_signature(layer) for layer in stack._layers}
    if len(kinds) > 1:
        _refuse("layers of several kinds")
    for ours, theirs in zip(stack._layers, spec.layer, strict=True):
        if tuple(ours.branches) != wanted:
            _refuse(f"a layer of {', '.join(ours.branches)}, where it knows {', '.join(wanted)}")
        slots = {"mixer": "self_attention", "cross": "attention", "feedforward": "ffn"}
        for name, norm in zip(wanted, ours.wiring.norms, strict=True):  # type: ignore[arg-type]
            slot = getattr(theirs, slots[name])
            _fill_norm(slot.layer_norm, norm)
            (_fill_feed if name == "feedforward" else _fill_attention)(slot, ours.branches[name])
    if name_of(stack.norm) != "none":
        _fill_norm(spec.layer_norm, stack.norm)


def _fill_attention(slot: Any, mixer: Any) -> None:
    pattern, over = str(mixer.pattern), mixer.over
    if name_of(mixer) != "attention" or pattern not in ("causal", "everything"):
        _refuse(f"the mixer '{name_of(mixer)}' with the pattern '{pattern}'")
    if not all(isinstance(m, nn.Linear) for m in (mixer.q, mixer.k, mixer.v, mixer.out)):
        _refuse("attention without all of its maps")
    if name_of(mixer.norm) != "none" or name_of(mixer.q_norm) != "none":
        _refuse("attention with norms inside")
    if name_of(mixer.score) not in ("scaled_dot", "dot"):
        _refuse(f"the score '{name_of(mixer.score)}'")
    if name_of(mixer.score) == "dot":
        slot.queries_scale = np.dtype("float32").type(1.0)
    groups = [(mixer.q, mixer.k, mixer.v)] if over == "self" else [(mixer.q,), (mixer.k, mixer.v)]
    for linear, maps in zip(slot.linear, [*groups, (mixer.out,)], strict=True):
        _fill_linear(linear, *maps)


def _fill_feed(slot: Any, feed: Any) -> None:
    if name_of(feed) == "glu":
        _fill_linear(slot.linear_0, feed.gate)
        _fill_linear(slot.linear_0_noact, feed.into)
    else:
        _fill_linear(slot.linear_0, feed.into)
    _fill_linear(slot.linear_1, feed.out)


def _fill_linear(slot: Any, *maps: nn.Linear) -> None:
    """Concatenate linear layers of the same input into one."""
    slot.weight = _array(torch.cat([m.weight for m in maps]))
    if any(m.bias is not None for m in maps):
        slot.bias = _array(torch.cat([m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in maps]))


def _fill_norm(slot: Any, norm: Any) -> None:
    kind = _norm_kind(norm)
    slot.gamma = _array(norm.inner.weight)
    if kind == "layer":
        slot.beta = _array(torch.zeros_like(norm.inner.weight) if norm.inner.bias is None else norm.inner.bias)


def _norm_kind(norm: Norm) -> str:
    if name_of(norm) not in ("layer", "rms") or norm.inner.weight is None:  # type: ignore[union-attr]
        _refuse(f"the norm '{name_of(norm)}'" + (" without a gain" if name_of(norm) in ("layer", "rms") else ""))
    return name_of(norm)


def _epsilon(model: Model) -> float:
    found = {m.inner.eps for m in model.modules() if isinstance(m, Norm) and name_of(m) in ("layer", "rms")}  # type: ignore[union-attr]
    if len(found) > 1:
        _refuse("norms with several epsilons")
    return found.pop()


def _first_attention(stack: Stack) -> Any:
    mixer: Mixer = stack._layers[0].mixers[0]
    if name_of(mixer) != "attention":
        _refuse(f"the mixer '{name_of(mixer)}'")
    return mixer


def _signature(layer: Layer) -> tuple:
    branches = [(name, name_of(m), str(getattr(m, "pattern", ""))) for name, m in layer.branches.items()]
    return tuple(branches), name_of(layer.wiring)


def _vocabulary(tokenizer: Tokenizer, size: int) -> list[str]:
    """Return all tokens by id. Ids beyond the vocabulary, which a larger table may have, get placeholders."""
    return [tokenizer.inner.id_to_token(i) or f"<unused{i}>" for i in range(size)]


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().contiguous().numpy()


def _refuse(what: str) -> NoReturn:
    raise UserError(
        f"CTranslate2 {ctranslate2.__version__} does not support {what}, so this model cannot be exported to it"
    )
