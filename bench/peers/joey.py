"""joeynmt 2.3 as its own `train` runs it: its data, its batches, its model, its step.

joey.py CONFIG.yaml
"""

import sys
from pathlib import Path

from joeynmt.config import load_config, parse_global_args, set_validation_args
from joeynmt.prediction import prepare
from joeynmt.training import TrainManager

from worker import peak, rest, serve

args = parse_global_args(load_config(Path(sys.argv[1])), rank=0, mode="train")
model, data, _, _ = prepare(args, rank=0, mode="train")
trainer = TrainManager(
    rank=0, model=model, model_dir=args.model_dir, device=args.device, n_gpu=args.n_gpu, num_workers=args.num_workers,
    autocast=args.autocast, seed=args.seed, train_args=args.train, dev_args=set_validation_args(args.test),
)  # fmt: skip


def batches():
    """Yield batches, epoch after epoch."""
    made = data.make_iter(
        batch_size=args.train.batch_size, batch_type=args.train.batch_type, seed=args.seed, shuffle=True,
        num_workers=0, device=args.device, eos_index=model.eos_index, pad_index=model.pad_index,
    )  # fmt: skip
    epoch = 0
    while True:
        data.seed = args.seed + epoch
        made.batch_sampler.set_seed(args.seed + epoch)
        yield from made
        epoch += 1


coming = batches()


def go(steps: str) -> dict:
    tokens = 0
    for _ in range(int(steps)):
        batch = next(coming)
        loss, _ = trainer._train_step(batch)
        trainer.clip_grad_fun(parameters=model.parameters())
        trainer.optimizer.step()
        model.zero_grad()
        tokens += batch.ntokens
    return {"tokens": int(tokens), "loss": float(loss), "peak": peak()}


rest()
serve(go)
