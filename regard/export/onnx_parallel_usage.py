"""The example code in the README of decoders that write all tokens at once: each strategy in plain NumPy."""

from __future__ import annotations

from typing import Any

RUN = """

def run(session, values):
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, session.run(names, {one.name: values[one.name] for one in session.get_inputs()})))

"""

LOG_SOFTMAX = """
def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))

"""

PARALLEL = """
answer = run(decoder, values)["logits"][0].argmax(-1).tolist()
"""

CTC = """
said = run(decoder, values)["logits"][0].argmax(-1).tolist()
joined = [token for i, token in enumerate(said) if i == 0 or token != said[i - 1]]
answer = [token for token in joined if token != model["pad"]]
"""

MASK_PREDICT = """
blank, logs = np.full(n, True), np.zeros(n)
for iteration in range(model["iterations"]):
    if iteration:  # the least probable tokens are written again
        count = int(np.float32(n) * np.float32(1 - iteration / model["iterations"]))
        blank = logs.argsort(kind="stable").argsort() < count
    if not blank.any():
        break
    canvas[0, blank] = -1
    found = log_softmax(run(decoder, values | {"input_ids": canvas})["logits"][0])
    canvas[0, blank], logs[blank] = found.argmax(-1)[blank], found.max(-1)[blank]
answer = canvas[0].tolist()
"""

LOOKAHEAD = """
found = run(decoder, values)
logs = log_softmax(found["logits"][0])
ways = found["links"][0] + logs.max(-1)  # a link, and the token behind it
path = [0]
while path[-1] < n - 1:
    path.append(int(ways[path[-1]].argmax()))
answer = logs.argmax(-1)[path].tolist()
"""

VITERBI = """
found = run(decoder, values)
tokens, transitions = found["candidates"][0], found["transitions"][0]
emissions = np.take_along_axis(found["logits"][0], tokens, -1)
total, back = emissions[0], []
for i in range(1, n):
    scores = total[:, None] + transitions[i - 1]
    total = scores.max(0) + emissions[i]
    back.append(scores.argmax(0))
path = [int(total.argmax())]
for before in reversed(back):
    path.append(int(before[path[-1]]))
answer = [int(tokens[i, at]) for i, at in enumerate(reversed(path))]
"""

CODE = {
    "parallel": PARALLEL, "ctc": CTC, "mask_predict": MASK_PREDICT, "lookahead": LOOKAHEAD, "viterbi": VITERBI,
}  # fmt: skip

WHAT = {
    "parallel": ["One pass writes the most probable token at each position."],
    "ctc": ["One pass says a token at each position; repeats are joined, and then the token `pad` is dropped."],
    "mask_predict": [
        "Each of `iterations` passes writes all blank positions, and before the next one the least probable tokens are",
        "blank again. The code tries one length, as `regard predict --length-beam 1` does.",
    ],
    "lookahead": [
        "`links` are the log-probabilities of going from one position (row) to a later one (column). The answer is",
        "what the positions on a path from the first to the last one say.",
    ],
    "viterbi": [
        "`candidates` are the tokens that are searched at each position, `transitions` the scores of going from each",
        "of them to each of the next position, and `logits` the scores of the tokens themselves.",
    ],
}


def facts_of(run: Any) -> dict[str, Any]:
    """Return what `model.json` says of a run."""
    facts = {"vocab": run.model.vocab, "strategy": run.config.strategy}
    if run.config.strategy == "mask_predict":
        facts["iterations"] = run.config.iterations
    return facts | {"end": run.target.end, "special": sorted({*run.marks})}


def about(strategy: str) -> list[str]:
    """Return lines of the README."""
    return [
        "`input_ids` of `decoder.onnx` are a canvas: tokens, and -1 where there is none yet. `lengths`, from",
        "`encoder.onnx`, are the positions that the canvas of each row has; shorter rows are padded, with 0 in",
        "`canvas_mask`.",
        "",
        *WHAT[strategy],
    ]


def writing(imports: str, source: str, target: str, strategy: str) -> str:
    """Return the example code: one text is translated. imports: the code before it."""
    code = CODE[strategy]
    return f"""{imports.strip()}
source, target = Tokenizer.from_file("{source}"), Tokenizer.from_file("{target}")
source.encode_special_tokens = True  # special tokens in a text are text
encoder, decoder = onnxruntime.InferenceSession("encoder.onnx"), onnxruntime.InferenceSession("decoder.onnx")
{RUN}{LOG_SOFTMAX if "log_softmax" in code else ""}
encoding = source.encode("a text")
mask = np.array([encoding.attention_mask])
values = {{"encoder_attention_mask": mask}}
values |= run(encoder, {{"input_ids": np.array([encoding.ids]), "attention_mask": mask}})
n = int(values["lengths"][0])
canvas = np.full((1, n), -1)
values |= {{"input_ids": canvas, "canvas_mask": np.ones_like(canvas)}}
{code.strip()}
if model["end"] in answer:
    answer = answer[: answer.index(model["end"])]
print(target.decode([token for token in answer if token not in model["special"]]))
"""
