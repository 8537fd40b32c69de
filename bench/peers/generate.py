"""Continue prompts greedily, by regard or by Hugging Face.

generate.py ours|hugging FOLDER ROWS PROMPT NEW THREADS [int8]
"""

import sys
import time

import torch

from worker import peak, rest, serve

which, folder = sys.argv[1:3]
rows, prompt, new, threads = map(int, sys.argv[3:7])
torch.set_num_threads(threads)
tokens = torch.randint(1000, 40_000, (rows, prompt), generator=torch.Generator().manual_seed(1))

if which == "ours":
    from regard import restore
    from regard.decode import Request, greedy
    from regard.decode.int8 import quantize
    from regard.machine import tune

    tune()
    model = restore(folder).eval()
    if "int8" in sys.argv:
        quantize(model)

    def generate(new: int) -> list[list[int]]:
        request = Request(tokens, -1, torch.full((rows,), new))
        return [answer.tokens for answer in greedy(model, request)]

else:
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(new: int) -> list[list[int]]:
        with torch.no_grad():
            said = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, min_new_tokens=new, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return said[:, prompt:].tolist()


said: list[list[int]] = []


def go() -> dict:
    """Return the seconds of the whole generation, and of the prompts with the first token alone."""
    begun = time.perf_counter()
    generate(1)
    first = time.perf_counter()
    said[:] = generate(new)
    ended = time.perf_counter()
    return {"tokens": rows * new, "seconds": ended - first, "first": first - begun, "peak": peak()}


rest()
serve(go, answers=lambda: {"answers": said})
