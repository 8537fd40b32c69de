"""Hugging Face transformers in a plain training loop: padded batches, its own loss, torch's fused AdamW.

hugging.py FOLDER BATCHES.json pairs|text|masked

The file may name an optimizer, a learning rate, a warmup, the steps until the learning rate is 0, and a label
smoothing.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from worker import peak, rest, serve

folder, file, kind = sys.argv[1:4]
told = json.loads(Path(file).read_text())
auto = {"pairs": AutoModelForSeq2SeqLM, "text": AutoModelForCausalLM, "masked": AutoModelForMaskedLM}[kind]
model = auto.from_pretrained(folder, dtype=torch.float32)
maps = {}
if told.get("optimizer") == "muon":  # maps by Muon, as regard has it, since torch's own is slow here; the rest by AdamW
    from regard.train.muon import Muon

    linear = [m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"]
    maps = {id(m.weight): m.weight for m in linear}
rest_of = [p for p in model.parameters() if id(p) not in maps]
optimizers: list = [torch.optim.AdamW(rest_of, 1e-4, (0.9, 0.98), 1e-8, weight_decay=0.0, fused=True)]
if maps:
    optimizers.append(Muon([*maps.values()], 1e-4))
smoothing, warmup, clip = told.get("smoothing", 0.0), told.get("warmup", 0), told.get("clip", 1.0)
at = 0


def padded(rows: list[list[int]], fill: int) -> torch.Tensor:
    long = max(map(len, rows))
    return torch.tensor([row + [fill] * (long - len(row)) for row in rows])


def batch(number: int) -> tuple[dict, int]:
    one = told["batches"][number % len(told["batches"])]
    if kind == "pairs":
        source, target = padded(one["source"], told["pad"]), padded(one["target"], -100)
        begun = torch.cat((torch.full_like(target[:, :1], told["start"]), target[:, :-1]), 1)
        given = {"input_ids": source, "attention_mask": (source != told["pad"]).long(), "labels": target}
        given["decoder_input_ids"] = begun.where(begun != -100, told["pad"])
        return given, int((target != -100).sum())
    tokens = torch.tensor(one["tokens"])
    if kind == "text":
        return {
            "input_ids": tokens[:, :-1],
            "labels": tokens[:, :-1],
            "shift_labels": tokens[:, 1:].contiguous(),
        }, tokens[:, 1:].numel()
    targets = torch.tensor(one["targets"])
    return {"input_ids": tokens, "attention_mask": (tokens != told["pad"]).long(), "labels": targets}, int(
        (targets != -100).sum()
    )


def loss() -> dict:
    model.eval()
    with torch.no_grad():
        return {"loss": float(model(**batch(0)[0]).loss)}


def smoothed(given: dict) -> torch.Tensor:
    labels = given.pop("labels")
    scores = model(**given).logits
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)


def keep(folder: str) -> dict:
    model.save_pretrained(folder)
    return {}


def go(steps: str) -> dict:
    global at
    model.train()
    tokens = 0
    for _ in range(int(steps)):
        given, count = batch(at)
        at += 1
        if warmup:
            for one in optimizers:
                one.param_groups[0]["lr"] = told["lr"] * min(
                    at / warmup, (told["steps"] - at) / (told["steps"] - warmup)
                )
        model.zero_grad()
        found = smoothed(given) if smoothing else model(**given).loss
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for one in optimizers:
            one.step()
        tokens += count
    return {"tokens": tokens, "loss": float(found.detach()), "peak": peak()}


rest()
serve(go, loss=loss, keep=keep)
