"""Translate the sentences of a file by beam search, by regard, Hugging Face or CTranslate2.

    translate.py ours|hugging|ctranslate2 MODEL SOURCES.json BEAM THREADS [int8|shortlist|each|stop=...|one]

one: each sentence by a separate call, as a user who waits for it would see it.

SOURCES.json: {"texts": [...], "tokens": [[...]], "ids": [[...]], "pad": n}. Texts are pieces between spaces.
"""

import json
import sys
from pathlib import Path

from worker import Held, peak, rest, serve

which, folder, file, beam, threads = sys.argv[1:6]
more = sys.argv[6:]
told = json.loads(Path(file).read_text())
beam, threads = int(beam), int(threads)
BATCH = 64
order = sorted(range(len(told["ids"])), key=lambda i: -len(told["ids"][i]))  # for those who do not sort by themselves

if which == "ctranslate2":
    import ctranslate2

    kind = "int8" if "int8" in more else "float32"
    many = threads if "each" in more else 1  # batches at once
    translator = ctranslate2.Translator(
        folder, compute_type=kind, inter_threads=many, intra_threads=max(threads // many, 1)
    )

    def translate() -> list[str]:
        groups = [[one] for one in told["tokens"]] if "one" in more else [told["tokens"]]
        found = [
            answer
            for group in groups
            for answer in translator.translate_batch(
                group, beam_size=beam, max_batch_size=BATCH, max_decoding_length=100
            )
        ]
        return [" ".join(one.hypotheses[0]) for one in found]

elif which == "hugging":
    import torch
    from transformers import MarianMTModel

    torch.set_num_threads(threads)
    model = MarianMTModel.from_pretrained(folder, dtype=torch.float32).eval()
    names: dict[int, str] = {int(number): name for number, name in told["names"].items()}

    def translate() -> list[str]:
        found = [""] * len(order)
        for begin in range(0, len(order), BATCH):
            some = order[begin : begin + BATCH]
            long = max(len(told["ids"][i]) for i in some)
            ids = torch.tensor([told["ids"][i] + [told["pad"]] * (long - len(told["ids"][i])) for i in some])
            with torch.no_grad():
                said = model.generate(
                    input_ids=ids, attention_mask=(ids != told["pad"]).long(), num_beams=beam, max_new_tokens=100,
                    do_sample=False, length_penalty=1.0,
                )  # fmt: skip
            for i, row in zip(some, said.tolist(), strict=True):
                found[i] = " ".join(names[token] for token in row if token not in told["marks"])
        return found

else:
    import torch

    import regard
    from regard.decode import DecodeConfig
    from regard.machine import tune

    tune()
    torch.set_num_threads(threads)
    run = regard.load(folder, int8="int8" in more)
    stop = next((word.partition("=")[2] for word in more if word.startswith("stop=")), "full")
    config = DecodeConfig(beam=beam, early_stopping=stop, shortlist="shortlist" in more)

    peak = Held().after  # helpers count as well

    def translate() -> list[str]:
        groups = [[one] for one in told["texts"]] if "one" in more else [told["texts"]]
        return [found[0].text for group in groups for found in run.predict(group, config)]


said: list[str] = []


def go() -> dict:
    said[:] = translate()
    return {"sentences": len(said), "peak": peak()}


rest()
serve(go, answers=lambda: {"answers": said})
