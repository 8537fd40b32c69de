"""Write the files with which ONNX graphs can be used without regard: tokenizers, `model.json` and `README.md`."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from regard.data.batches import FIRST_LABEL
from regard.data.tokenizer import Tokenizer
from regard.tasks.embed import Embedder
from regard.tasks.fill import Filler
from regard.tasks.match import Matcher
from regard.tasks.run import MAX_NEW_TOKENS, Run
from regard.tasks.tag import Tagger
from regard.tasks.translate_parallel import ParallelTranslator

from .onnx_parallel_usage import about, facts_of, writing


def describe(run: Any, folder: Path, graphs: dict[str, Any]) -> None:
    """Write these files. graphs: name -> onnxruntime session."""
    cached = (folder / "start.npz").exists()
    facts: dict[str, Any] = {"kind": run.model.kind, "pad": run.source.pad, "max_positions": run.model.limit}
    if isinstance(run, ParallelTranslator):
        facts |= facts_of(run)
    elif isinstance(run, Run):
        facts |= {"vocab": run.model.vocab, "cache": cached, "opening": run.decoder_prefix or [run.token_before_text]}
        facts |= {
            "end": run.target.end,
            "ends": [run.target.end, *run.target.extra_ends],
            "never": run.target.suppressed,
        }
    elif isinstance(run, Filler):
        facts |= {"mask": run.source.inner.token_to_id(run.mask), "never": run.never_filled.nonzero()[:, 0].tolist()}
    elif getattr(run.model.head, "classes", None) is not None:
        names = (run.target.inner.id_to_token(FIRST_LABEL + i) for i in range(run.model.head.classes))
        facts["labels"] = list(names)
    facts["graphs"] = {f"{name}.onnx": _tensors(session) for name, session in graphs.items()}
    text = json.dumps(facts, indent=1, ensure_ascii=False)
    (folder / "model.json").write_text(text + "\n", encoding="utf-8")
    source, target = _save_tokenizers(run, folder)
    if isinstance(run, ParallelTranslator):
        code = writing(IMPORTS, source, target, run.config.strategy)
    else:
        code = _decoding(run, source, target, cached) if isinstance(run, Run) else _reading(run, source)
    (folder / "README.md").write_text(_readme(facts, code), encoding="utf-8")


def _tensors(session: Any) -> dict[str, Any]:
    sides = {"inputs": session.get_inputs(), "outputs": session.get_outputs()}
    return {
        side: {one.name: [_kind(one.type), *map(_size, one.shape)] for one in found} for side, found in sides.items()
    }


def _size(size: int | str) -> int | str:
    """Return a symbolic size such as "past + new" with its terms in a fixed order, which torch varies."""
    return size if isinstance(size, int) else " + ".join(sorted(size.split(" + "), reverse=True))


def _kind(word: str) -> str:
    """Return the NumPy name of an ONNX type: tensor(float) -> float32."""
    return {"float": "float32", "double": "float64"}.get(word[7:-1], word[7:-1])


def _save_tokenizers(run: Any, folder: Path) -> tuple[str, str]:
    """Write the tokenizers so that they add the special tokens around a text. Return the names of the files."""
    names = ("tokenizer.json", "tokenizer.json")
    reads_labels = not isinstance(run, Run) and run.target is not run.source
    if run.source is not run.target and not reads_labels:
        names = ("source.tokenizer.json", "target.tokenizer.json")
        run.target.save(folder / names[1])
    framed = _framed(run.source) if not isinstance(run, Run) or run.pairs else run.source
    framed.save(folder / names[0])
    return names


def _framed(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with a post-processor that appends the end token as
    `Tokenizer.encode_with_special_tokens` does."""
    if tokenizer.adds_special_tokens:
        return tokenizer
    inner = tokenizers.Tokenizer.from_str(tokenizer.inner.to_str())
    end = {"id": "end", "ids": [tokenizer.end], "tokens": [inner.id_to_token(tokenizer.end)]}
    template = processors.TemplateProcessing(single="$A end", pair="$A end $B:1 end:1", special_tokens=[end])
    before = inner.post_processor
    inner.post_processor = template if before is None else processors.Sequence([before, template])
    marks = {"pad": tokenizer.pad, "unk": tokenizer.unk, "start": tokenizer.start, "end": tokenizer.end}
    return Tokenizer(inner, marks)


def _readme(facts: dict[str, Any], code: str) -> str:
    lines = ["# A model as ONNX graphs", "", "Written by `regard export`. Batch and lengths are dynamic."]
    for name, tensors in facts["graphs"].items():
        lines += ["", f"`{name}`", "", "| | tensor | type | shape |", "|---|---|---|---|"]
        for side, found in tensors.items():
            for (_, entry), group in groupby(found.items(), lambda pair: (pair[0].partition(".")[0], pair[1])):
                names = [tensor for tensor, _ in group]
                shown = names if len(names) < 3 else [f"{names[0]}` to `{names[-1]}"]
                shape = " x ".join(map(str, entry[1:]))
                lines += [f"| {side[:-1]} | `{one}` | {entry[0]} | {shape} |" for one in shown]
    lines += ["", "Texts are padded on the right with the token `pad` of `model.json`; `attention_mask` is 1 for"]
    lines += ["tokens and 0 for padding."]
    if facts.get("cache"):
        lines += ["", "What is `present.*` after a step is `past.*` in the next one; `start.npz` holds the first"]
        lines += ["`past.*` of one row. `position_ids` count from 0 in every row, and are -1 for padding."]
    if "strategy" in facts:
        lines += ["", *about(facts["strategy"])]
    return "\n".join([*lines, "", "```python", *code.strip().splitlines(), "```", ""])


IMPORTS = """
import json
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

model = json.loads(Path("model.json").read_text(encoding="utf-8"))
"""

RUN = """

def run(session, values):
    found = session.run(None, {one.name: values[one.name] for one in session.get_inputs()})
    return {one.name.replace("present.", "past."): value for one, value in zip(session.get_outputs(), found)}

"""

CACHED = """
    values |= {"input_ids": np.array([[ids[position]]]), "position_ids": np.array([[position]])}
    values |= run(decoder, values)
    if position + 1 < len(ids):  # a token of the prompt
        continue
"""

UNCACHED = """
    if position + 1 < len(ids):
        continue
    values |= run(decoder, values | {"input_ids": np.array([ids])})
"""


def _decoding(run: Run, source: str, target: str, cached: bool) -> str:
    """Return the example code of a README: a greedy decoding loop."""
    start = 'dict(np.load("start.npz"))' if cached else "{}"
    if run.pairs:
        code = f"""
{IMPORTS.strip()}
source, target = Tokenizer.from_file("{source}"), Tokenizer.from_file("{target}")
source.encode_special_tokens = True  # special tokens in a text are text
encoder, decoder = onnxruntime.InferenceSession("encoder.onnx"), onnxruntime.InferenceSession("decoder.onnx")
{RUN}
encoding = source.encode("a text")
mask = np.array([encoding.attention_mask])
values = {start} | {{"encoder_attention_mask": mask}}
values |= run(encoder, {{"input_ids": np.array([encoding.ids]), "attention_mask": mask}})
ids = list(model["opening"])
prompt, max_new_tokens = len(ids), 2 * len(encoding.ids) + 20
"""
    else:
        code = f"""
{IMPORTS.strip()}
target = Tokenizer.from_file("{target}")
target.encode_special_tokens = True  # special tokens in a text are text
decoder = onnxruntime.InferenceSession("decoder.onnx")
{RUN}
values = {start}
ids = model["opening"] + target.encode("a text", add_special_tokens=False).ids
prompt, max_new_tokens = len(ids), {MAX_NEW_TOKENS}
"""
    return f"""{code.strip()}
for position in range(min(prompt - 1 + max_new_tokens, model["max_positions"] or 10**9)):
{(CACHED if cached else UNCACHED).strip(chr(10))}
    logits = values["logits"][0, -1]
    logits[model["never"]] = -np.inf
    ids.append(int(logits.argmax()))
    if ids[-1] in model["ends"]:
        break
print(target.decode(ids[prompt:]))
"""


def _reading(run: Any, source: str) -> str:
    """Return the example code of a README: one text, or a pair, through model.onnx."""
    pair = isinstance(run, Matcher)
    filling = isinstance(run, Filler)
    texts = '"a text", "another"' if pair else '"' + (f"a {run.mask} text" if filling else "a text") + '"'
    marks = "" if filling else "tokenizer.encode_special_tokens = True  # special tokens in a text are text\n"
    answer = 'print(model["labels"][found[0].argmax()])'
    if isinstance(run, Embedder):
        answer = "print(found[0])"
    elif filling:
        answer = """
scores = found[0, encoding.ids.index(model["mask"])]
scores[model["never"]] = -np.inf
print(tokenizer.id_to_token(int(scores.argmax())))
"""
    elif isinstance(run, Tagger):
        answer = """
tags = {}
for (begin, end), number in zip(encoding.offsets, found[0].argmax(-1)):
    piece = text[begin:end]
    if piece.strip():  # the first token of a word decides
        word = text.count(" ", 0, begin + len(piece) - len(piece.lstrip()))
        tags.setdefault(word, model["labels"][number])
print(" ".join(f"{word}/{tags.get(i, '?')}" for i, word in enumerate(text.split(" "))))
"""
    elif getattr(run.model.head, "classes", None) is None:
        answer = "print(found[0, 0])"
    given = "*texts" if pair else "text"
    return f"""{IMPORTS.strip()}
tokenizer = Tokenizer.from_file("{source}")
{marks}session = onnxruntime.InferenceSession("model.onnx")

{given.strip("*")} = {texts}
encoding = tokenizer.encode({given})
values = {{"input_ids": encoding.ids, "attention_mask": encoding.attention_mask, "token_type_ids": encoding.type_ids}}
values = {{one.name: np.array([values[one.name]]) for one in session.get_inputs()}}
found = session.run(None, values)[0]
{answer.strip()}
"""
