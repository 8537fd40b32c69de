"""joeynmt 2.3: its model, its batch, its loss, trained by torch's Adam.

joey.py BATCHES.json WIDTH HEADS DEPTH HIDDEN VOCAB DROPOUT
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from joeynmt.batch import Batch
from joeynmt.model import build_model
from joeynmt.vocabulary import Vocabulary

from worker import peak, rest, serve

told = json.loads(Path(sys.argv[1]).read_text())
width, heads, depth, hidden, vocab = map(int, sys.argv[2:7])
drop = float(sys.argv[7])
marks = SimpleNamespace(
    pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>", sep_token=None, lang_tags=[],
    pad_id=1, bos_id=2, eos_id=3, unk_id=0, sep_id=None,
)  # fmt: skip
PAD, START, END = 1, 2, 3
THEIRS = {0: PAD, 1: START, 2: END, 3: 0}  # special tokens have numbers of their own here
words = Vocabulary([f"w{i}" for i in range(4, vocab)], marks)
side = {
    "type": "transformer", "num_layers": depth, "num_heads": heads, "hidden_size": width, "ff_size": hidden,
    "dropout": drop, "layer_norm": "post", "embeddings": {"embedding_dim": width, "scale": True, "dropout": drop},
}  # fmt: skip
shared = {"tied_embeddings": True, "tied_softmax": True, "initializer": "xavier_uniform"}
shared |= {"embed_initializer": "xavier_uniform", "bias_initializer": "zeros"}
model = build_model({"encoder": dict(side), "decoder": dict(side), **shared}, words, words)
model.loss_function = ("crossentropy", 0.0)
optimiser = torch.optim.Adam(model.parameters(), 1e-4, (0.9, 0.98))
at = 0


def padded(rows: list[list[int]]) -> torch.Tensor:
    long = max(map(len, rows))
    return torch.tensor([[THEIRS.get(token, token) for token in row] + [PAD] * (long - len(row)) for row in rows])


def go(steps: str) -> dict:
    global at
    model.train()
    tokens = 0
    for _ in range(int(steps)):
        one = told["batches"][at % len(told["batches"])]
        source, target = padded(one["source"]), padded([[1, *row] for row in one["target"]])
        lengths = torch.tensor([len(row) for row in one["source"]])
        batch = Batch(source, lengths, None, target, None, torch.arange(len(source)), torch.device("cpu"), PAD, END)
        optimiser.zero_grad()
        loss = model(return_type="loss", **vars(batch))[0] / batch.ntokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        at, tokens = at + 1, tokens + batch.ntokens
    return {"tokens": tokens, "loss": float(loss.detach()), "peak": peak()}


rest()
serve(go)
