"""`regard train`: train a model on files and write a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from regard.errors import UserError
from regard.files import recipe as recipes

from .app import AsJson, Parts, Sets, Size, add_parts, app, dump

DATA = "Data"
STOPPING = "When to stop"
FINE_TUNING = "Fine-tuning"
OPTIMIZATION = "Optimization"
RESUME_OPTIONS = (
    "resume",
    "minutes",
    "steps",
    "epochs",
    "device",
    "threads",
    "parts",
    "as_json",
)  # options that --resume allows

Data = Annotated[
    str | None,
    typer.Option("--data", metavar="FILE|FOLDER|A,B", rich_help_panel=DATA, help="TSV, CSV, JSON lines, Parquet, text, "
                 "gzipped or not; a folder with train, dev, test; two parallel files A,B; a Hugging Face name."),
]  # fmt: skip
Source = Annotated[
    str | None, typer.Option(metavar="FILE", rich_help_panel=DATA, help="Source side of parallel files.")
]
Target = Annotated[
    str | None, typer.Option(metavar="FILE", rich_help_panel=DATA, help="Target side of parallel files.")
]
Columns = Annotated[
    str | None, typer.Option(metavar="A,B", rich_help_panel=DATA, help="Columns of a table, by name or number from 0.")
]
Header = Annotated[
    str | None,
    typer.Option(
        metavar="yes|no",
        rich_help_panel=DATA,
        help="Whether the first line of a TSV or CSV file is a header; by default, its words decide.",
    ),
]
BadLines = Annotated[str, typer.Option(metavar="refuse|skip", rich_help_panel=DATA, help="What to do with bad lines.")]
AnyReference = Annotated[
    bool, typer.Option("--any-reference", help="Where a source has several lines, each of its targets is correct.")
]
Origin = Annotated[
    Path | None,
    typer.Option("--from", metavar="RUN", rich_help_panel=FINE_TUNING, help="Begin with its model and tokenizer."),
]
Task = Annotated[
    str | None,
    typer.Option(
        "--task", metavar="classify|match|tag", rich_help_panel=FINE_TUNING, help="Put a new head on the model: "
        "labels of texts, labels or scores of pairs of texts, tags of words.",
    ),
]  # fmt: skip
Freeze = Annotated[
    str | None,
    typer.Option(
        metavar="N|embed|body",
        rich_help_panel=FINE_TUNING,
        help="Freeze the N lowest layers, the embeddings, or all but the head.",
    ),
]
Lora = Annotated[
    int | None, typer.Option("--lora", metavar="RANK", rich_help_panel=FINE_TUNING, help="Train LoRA matrices only.")
]
Teacher = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN", rich_help_panel=DATA, help="Learn what this run answers instead of the targets (see regard "
        "distill); its tokenizer and, without --data, its data are used.",
    ),
]  # fmt: skip
Lr = Annotated[float | None, typer.Option(rich_help_panel=OPTIMIZATION, help="Peak learning rate (train.lr).")]
BatchTokens = Annotated[
    int | None,
    typer.Option(rich_help_panel=OPTIMIZATION, help="Tokens of a batch, padding included (train.batch_tokens)."),
]
BatchSize = Annotated[
    int | None, typer.Option(rich_help_panel=OPTIMIZATION, help="Sequences of a batch (train.batch_size).")
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", rich_help_panel=OPTIMIZATION, help="adam, adamw, muon, adafactor, sgd (train.optimizer)."
    ),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", rich_help_panel=OPTIMIZATION, help="inverse_sqrt, cosine, linear, constant (train.schedule)."
    ),
]
Warmup = Annotated[int | None, typer.Option(rich_help_panel=OPTIMIZATION, help="Steps of warm-up (train.warmup).")]
Dropout = Annotated[
    float | None, typer.Option(rich_help_panel=OPTIMIZATION, help="Dropout of the model (model.dropout).")
]
LabelSmoothing = Annotated[
    float | None, typer.Option(rich_help_panel=OPTIMIZATION, help="Label smoothing (train.label_smoothing).")
]
WeightDecay = Annotated[
    float | None, typer.Option(rich_help_panel=OPTIMIZATION, help="Weight decay of matrices (train.weight_decay).")
]
EvalSteps = Annotated[
    int | None, typer.Option(rich_help_panel=OPTIMIZATION, help="Steps between evaluations on dev (train.eval_steps).")
]
Patience = Annotated[
    int | None,
    typer.Option(
        rich_help_panel=OPTIMIZATION, help="Evaluations without a better metric before stopping (train.patience)."
    ),
]
AsPublished = Annotated[
    bool,
    typer.Option(
        "--as-published", rich_help_panel=OPTIMIZATION, help="Use the recipe's own settings; by default, settings that "
        "are not given are chosen by the budget, the data and the model.",
    ),
]  # fmt: skip
Minutes = Annotated[
    float | None,
    typer.Option(rich_help_panel=STOPPING, help="Of the whole run, including those before --resume."),
]
Steps = Annotated[int | None, typer.Option(rich_help_panel=STOPPING, help="Of the whole run.")]
Epochs = Annotated[float | None, typer.Option(rich_help_panel=STOPPING, help="Of the whole run.")]


@app.command()
def train(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A name (see `regard systems`) or a file.")
    ] = None,
    data: Data = None,
    source: Source = None,
    target: Target = None,
    dev: Annotated[
        str | None, typer.Option(metavar="FILE|N", rich_help_panel=DATA, help="Files, a share of the data, or a count.")
    ] = None,
    test: Annotated[
        str | None, typer.Option(metavar="FILE|N", rich_help_panel=DATA, help="As --dev, for the test set.")
    ] = None,
    columns: Columns = None,
    header: Header = None,
    bad_lines: BadLines = "refuse",
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="KIND[,KIND]",
            rich_help_panel=DATA,
            help="bpe, wordpiece, unigram, characters, bytes, "
            "words, pretokenised or a tokenizer.json; two for source and target apart.",
        ),
    ] = None,
    vocab: Annotated[int | None, typer.Option(rich_help_panel=DATA, help="Tokens of a tokenizer learned here.")] = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", rich_help_panel=DATA)] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="RUN", help="The run folder; runs/RECIPE-N.")] = None,
    size: Size = None,
    sets: Sets = None,
    parts: Parts = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="Measured on dev besides the loss, the first one decides what is best: bleu, chrf, ter, exact, "
            "token_error, sequence_error, accuracy, f1, pearson, spearman, tag_accuracy, span_f1."
        ),
    ] = None,
    any_reference: AnyReference = False,
    teacher: Teacher = None,
    origin: Origin = None,
    task: Task = None,
    freeze: Freeze = None,
    lora: Lora = None,
    lr: Lr = None,
    batch_tokens: BatchTokens = None,
    batch_size: BatchSize = None,
    optimizer: Optimizer = None,
    schedule: Schedule = None,
    warmup: Warmup = None,
    dropout: Dropout = None,
    label_smoothing: LabelSmoothing = None,
    weight_decay: WeightDecay = None,
    eval_steps: EvalSteps = None,
    patience: Patience = None,
    as_published: AsPublished = False,
    minutes: Minutes = None,
    steps: Steps = None,
    epochs: Epochs = None,
    seed: Annotated[int | None, typer.Option(help="Random seed.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, mps, ...; cpu, or that of the resumed run.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads; 0: as many as there are cores.")] = 0,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Resume this run.")] = None,
    as_json: AsJson = False,
) -> int:
    """Train a model on your own files."""
    if recipe is not None and resume is None:
        recipes.read(recipe)  # report a typo before torch is imported
    from regard.train import job as jobs
    from regard.train import pick as picking

    from .bar import Bar

    add_parts(parts)
    bounds = {k: v for k, v in (("minutes", minutes), ("steps", steps), ("epochs", epochs)) if v is not None}
    for name, bound in bounds.items():
        if not bound > 0:
            raise UserError(f"--{name} must be above 0, not {bound:g}")
    bar = Bar(Console(stderr=as_json))
    with bar.running():
        if resume is not None:
            for given in context.command.params:
                source = context.get_parameter_source(given.name or "")
                if source is not None and source.name == "COMMANDLINE" and given.name not in RESUME_OPTIONS:
                    name = given.opts[0] if given.param_type_name == "option" else given.human_readable_name
                    raise UserError(f"--resume goes on with a run as it is: leave out {name}")
            prepared = jobs.resume(resume, bounds, bar.say, bar.tick, device, threads)
        else:
            if recipe is None and origin is None:
                if teacher is not None:
                    raise UserError(f"which recipe is the student? Say, regard train nat --teacher {teacher}")
                if data is None and source is None:
                    raise UserError("what to learn from? Say regard train --data FILE, or --resume RUN")
                given = picking.DataArguments(data, source, target, columns, header, bad_lines)
                picked = picking.pick(given, task)
                bar.say(f"picked: {picked.recipe}, size {size or picked.size} ({picked.why})")
                if picked.note:
                    bar.say(picked.note)
                recipe, size, task = picked.recipe, size or picked.size, picked.task
                columns = columns or picked.columns
            elif recipe is None and columns is None and data is not None:
                seen = picking.detect_columns(
                    picking.DataArguments(data, source, target, None, header, bad_lines), origin, task
                )
                if seen is not None:
                    bar.say(f"picked: --columns {seen.columns} ({seen.why})")
                    columns = seen.columns
            if lora is not None and lora < 1:
                raise UserError(f"--lora is the rank of LoRA's matrices, at least 1, not {lora}")
            keys = {
                "train.lr": lr, "train.batch_tokens": batch_tokens, "train.batch_size": batch_size,
                "train.optimizer": optimizer, "train.schedule": schedule, "train.warmup": warmup,
                "model.dropout": dropout, "train.label_smoothing": label_smoothing, "train.weight_decay": weight_decay,
                "train.eval_steps": eval_steps, "train.patience": patience,
                "train.minutes": minutes, "train.steps": steps, "train.epochs": epochs,
                "train.seed": seed, "train.metric": metric[0] if metric else None, "train.freeze": freeze,
            }  # fmt: skip
            chosen = [f"{key}={value}" for key, value in keys.items() if value is not None]
            name = recipe or "-".join([origin.resolve().name, *([task] if task else [])])  # type: ignore[union-attr]
            job = jobs.Job(
                recipe or "", str(out or next_folder(name)), size, [*chosen, *(sets or [])], data, source, target, dev,
                test, columns, bad_lines, tokenizer=tokenizer, vocab=vocab, lowercase=lowercase, metrics=metric or [],
                any_reference=any_reference, device=device or "cpu", threads=threads,
                origin=origin and str(origin), teacher=teacher and str(teacher), task=task,
                lora=lora or 0, header=header, as_published=as_published,
            )  # fmt: skip
            prepared = jobs.start(job, bar.say, bar.tick)
        run = prepared.train(bar.report)
    measured = {k: v for k, v in prepared.trainer.metrics.items() if k != "step"}
    if as_json:
        dump({"run": str(run.folder), "step": prepared.trainer.step, "metrics": measured})
        return 0
    bar.say("  ".join([f"done: {run.folder}", *(f"{name} {value:.3f}" for name, value in measured.items())]))
    how = f"echo ... | regard predict {run.folder}" if run.takes == "texts" else f"regard predict {run.folder} FILE"
    bar.say(f"try it: {f'regard evaluate {run.folder}' if prepared.task.reads == 'graph' else how}")
    return 0


def next_folder(recipe: str) -> Path:
    """Return the first free name of runs/transformer-1, runs/transformer-2, ..."""
    name = Path(recipe).stem
    number = 1
    while (Path("runs") / f"{name}-{number}").exists():
        number += 1
    return Path("runs") / f"{name}-{number}"
