"""Handwritten training loops around torch's own layers, or around x-transformers.

plain.py nn_transformer|gpt|x_transformers BATCHES.json WIDTH HEADS DEPTH HIDDEN VOCAB DROPOUT
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker import peak, rest, serve

which, file = sys.argv[1:3]
width, heads, depth, hidden, vocab = map(int, sys.argv[3:8])
drop = float(sys.argv[8])
told = json.loads(Path(file).read_text())


class Seq2seq(nn.Module):
    """nn.Transformer, post-norm, one table for all."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(vocab, width)
        self.places = nn.Parameter(torch.randn(512, width) * 0.02, requires_grad=False)
        self.drop = nn.Dropout(drop)
        self.inner = nn.Transformer(width, heads, depth, depth, hidden, drop, batch_first=True)

    def read(self, tokens: Tensor) -> Tensor:
        return self.drop(self.table(tokens) * width**0.5 + self.places[: tokens.shape[1]])

    def forward(self, source: Tensor, tokens: Tensor) -> Tensor:
        padding = source == told["pad"]
        ahead = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.inner(
            self.read(source), self.read(tokens), tgt_mask=ahead, src_key_padding_mask=padding,
            memory_key_padding_mask=padding, tgt_is_causal=True,
        )  # fmt: skip
        return F.linear(x, self.table.weight)


class Block(nn.Module):
    """A pre-norm block with fused query, key and value, and torch's fused attention."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in self.into(self.one(x)).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=drop if self.training else 0.0, is_causal=True)
        x = x + self.drop(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.two(x)), approximate="tanh")))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.places = nn.Embedding(vocab, width), nn.Embedding(1024, width)
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(drop)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.table(tokens) + self.places(torch.arange(tokens.shape[1])))
        return F.linear(self.norm(self.blocks(x)), self.table.weight)


def foreign() -> nn.Module:
    """Return an x-transformers model as similar to a GPT as its flags allow."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=width, depth=depth, heads=heads, attn_dim_head=width // heads, attn_flash=True, ff_mult=hidden / width,
        ff_dropout=drop,
    )  # fmt: skip
    return TransformerWrapper(
        num_tokens=vocab, max_seq_len=1024, attn_layers=layers, emb_dropout=drop, tie_embedding=True
    )


model = {"nn_transformer": Seq2seq, "gpt": Gpt, "x_transformers": foreign}[which]()
if which != "x_transformers":  # as nanoGPT does; torch's own tables make the first scores so large that all is slow
    nn.init.normal_(model.table.weight, std=0.02)
optimizer = torch.optim.AdamW(model.parameters(), 1e-4, (0.9, 0.98), 1e-8, weight_decay=0.0, fused=True)
at = 0


def padded(rows: list[list[int]], fill: int) -> Tensor:
    long = max(map(len, rows))
    return torch.tensor([row + [fill] * (long - len(row)) for row in rows])


def step(number: int) -> tuple[Tensor, int]:
    one = told["batches"][number % len(told["batches"])]
    if which != "nn_transformer":
        tokens = torch.tensor(one["tokens"])
        scores, targets = model(tokens[:, :-1]), tokens[:, 1:]
    else:
        targets = padded(one["target"], -100)
        begun = torch.cat((torch.full_like(targets[:, :1], told["start"]), targets[:, :-1]), 1)
        scores = model(padded(one["source"], told["pad"]), begun.where(begun != -100, told["pad"]))
    loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=-100)
    return loss, int((targets != -100).sum())


def go(steps: str) -> dict:
    global at
    model.train()
    tokens = 0
    for _ in range(int(steps)):
        optimizer.zero_grad()
        loss, count = step(at)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        at, tokens = at + 1, tokens + count
    return {"tokens": tokens, "loss": float(loss.detach()), "peak": peak()}


rest()
serve(go)
