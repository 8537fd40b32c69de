"""`regard predict`: run a trained model on texts, pictures or recordings."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.errors import UserError, printable

from .app import Parts, Threads, add_parts, app, dump

DECODING = "How to decode"
PARALLEL = "Decoders that write all tokens at once"
VECTORS = "Vectors of texts"
MEDIA = "Pictures and recordings"
READ_AHEAD = 4096  # texts to read ahead, so that texts of similar length share a batch

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, as `regard train` leaves it.")]
Beam = Annotated[
    int | None, typer.Option(rich_help_panel=DECODING, help="Hypotheses of beam search; 1 for greedy search.")
]
LengthPenalty = Annotated[float | None, typer.Option(rich_help_panel=DECODING, help="Exponent of the length.")]
EarlyStopping = Annotated[
    str | None,
    typer.Option(
        metavar="full|heuristic|never",
        rich_help_panel=DECODING,
        help="When beam search ends: full, once as many hypotheses as the beam have ended; heuristic, once no open one "
        "is more probable than those; never, once nothing better is possible.",
    ),
]
NumReturn = Annotated[int | None, typer.Option(rich_help_panel=DECODING, help="Answers for each input.")]
Temperature = Annotated[float | None, typer.Option(rich_help_panel=DECODING, help="Above 0: sample; 0: greedy.")]
TopK = Annotated[int | None, typer.Option(rich_help_panel=DECODING, help="Sample from so many tokens.")]
TopP = Annotated[
    float | None, typer.Option(rich_help_panel=DECODING, help="Sample from tokens of so much probability together.")
]
MaxNewTokens = Annotated[int | None, typer.Option(rich_help_panel=DECODING, help="Most tokens of an answer.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, mps, ...")]
Int8 = Annotated[bool, typer.Option("--int8", help="8-bit weights: faster on a CPU, less exact.")]

Strategy = Annotated[
    str | None,
    typer.Option(
        metavar="parallel|mask_predict|...",
        rich_help_panel=PARALLEL,
        help="How the canvas is filled; see decode.strategy.",
    ),
]
Iterations = Annotated[
    int | None, typer.Option(rich_help_panel=PARALLEL, help="The most passes of mask_predict and edit.")
]
LengthBeam = Annotated[int | None, typer.Option(rich_help_panel=PARALLEL, help="Lengths that are tried side by side.")]
Rescore = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        rich_help_panel=PARALLEL,
        help="An autoregressive run over the same tokens that ranks the answers.",
    ),
]

Ensemble = Annotated[
    list[Path] | None,
    typer.Option("--ensemble", metavar="RUN", help="Another run to average probabilities with; repeatable."),
]
Shortlist = Annotated[
    bool, typer.Option("--shortlist", help="Score only likely target words, from the list of 'regard shortlist'.")
]


@app.command()
def predict(
    run: RunFolder,
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="Texts, one a line; - for standard input. Or pictures, or recordings."),
    ] = None,
    beam: Beam = None,
    length_penalty: LengthPenalty = None,
    early_stopping: EarlyStopping = None,
    num_return: NumReturn = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=DECODING,
            help="Above 0: sample; 0: greedy. Without options, a language model trained here samples with "
            "--temperature 0.8 --top-p 0.95 --seed 1.",
        ),
    ] = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: Annotated[float | None, typer.Option(rich_help_panel=DECODING)] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(rich_help_panel=DECODING, help="Above 1: discourage repeats.")
    ] = None,
    seed: Annotated[int | None, typer.Option(rich_help_panel=DECODING, help="Seed of sampling.")] = None,
    max_new_tokens: MaxNewTokens = None,
    speculate: Annotated[
        int | None,
        typer.Option(rich_help_panel=DECODING, help="Tokens drafted at a time: faster, and the same answers."),
    ] = None,
    draft_model: Annotated[
        Path | None, typer.Option(metavar="RUN", rich_help_panel=DECODING, help="A smaller run that drafts tokens.")
    ] = None,
    strategy: Strategy = None,
    iterations: Iterations = None,
    length_beam: LengthBeam = None,
    rescore: Rescore = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", rich_help_panel=DECODING, help="Shorten inputs that are too long.")
    ] = False,
    embed: Annotated[
        bool, typer.Option("--embed", rich_help_panel=VECTORS, help="A vector for each text, of any encoder.")
    ] = False,
    pool: Annotated[
        str | None,
        typer.Option(metavar="mean|first|max", rich_help_panel=VECTORS, help="How tokens become one vector."),
    ] = None,
    normalize: Annotated[
        bool | None, typer.Option("--normalize/--no-normalize", rich_help_panel=VECTORS, help="Vectors of length 1.")
    ] = None,
    similarity: Annotated[
        bool,
        typer.Option("--similarity", rich_help_panel=VECTORS, help="The cosine of two texts with a tab between."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.npy", rich_help_panel=VECTORS, help="Vectors into a NumPy file.")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(rich_help_panel=MEDIA, help="What a picture may show; repeatable.")
    ] = None,
    language: Annotated[str | None, typer.Option(rich_help_panel=MEDIA, help="Spoken language: en, de, ...")] = None,
    task: Annotated[str | None, typer.Option(metavar="transcribe|translate", rich_help_panel=MEDIA)] = None,
    timestamps: Annotated[bool, typer.Option("--timestamps", rich_help_panel=MEDIA, help="Output timestamps.")] = False,
    attention: Annotated[
        bool, typer.Option("--attention", help="With --json: the cross-attention of every answer.")
    ] = False,
    stream: Annotated[
        bool | None, typer.Option("--stream/--no-stream", help="Print tokens as they are generated.")
    ] = None,
    shortlist: Shortlist = False,
    ensemble: Ensemble = None,
    device: Device = "cpu",
    threads: Threads = 0,
    int8: Int8 = False,
    parts: Parts = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines with scores, all answers, alignments.")] = False,
) -> None:
    """Predict: translate, continue a prompt, fill [MASK], classify, embed; classify pictures, transcribe speech."""
    if as_json and (stream or out):
        raise UserError("--json writes whole answers: leave out --stream and --out")
    if attention and not as_json:
        raise UserError("--attention writes matrices: say --json as well")
    for file in files or []:
        if file != "-" and not Path(file).is_file():
            raise UserError(f"there is no file '{file}' to read from")
    from regard.tasks.embed import Embedder

    loaded = open_run(run, device, parts, int8, ensemble)
    of_vectors = {"pool": pool, "normalize": normalize, "similarity": similarity or None, "out": out}
    if embed or any(value is not None for value in of_vectors.values()):
        loaded = Embedder.of(loaded)
    own = {**of_vectors, "text": text or None, "language": language, "task": task, "timestamps": timestamps or None,
           "attention": attention or None, "stream": stream or None, "draft_model": draft_model,
           "rescore": rescore}  # fmt: skip
    speculate = 4 if draft_model is not None and speculate is None else speculate
    if stream and speculate:
        raise UserError(
            "--speculate accepts several tokens at a time, and --stream prints them one by one: leave one out"
        )
    config = decode_config(
        loaded, own, beam=beam, length_penalty=length_penalty, early_stopping=early_stopping, num_return=num_return,
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        seed=seed, max_new_tokens=max_new_tokens, truncate=truncate or None, speculate=speculate,
        shortlist=shortlist or None, strategy=strategy, iterations=iterations, length_beam=length_beam,
    )  # fmt: skip
    if seed is not None and not config.samples:
        raise UserError("--seed is for answers that are drawn at random: say --temperature as well, such as 0.8")
    if loaded.takes != "texts":
        return _print_file_answers(loaded, files or [], config, as_json)
    texts = read_lines(files or ["-"]) if isinstance(loaded, Embedder) else read_texts(loaded, files or ["-"])
    if out is not None:
        return loaded.save(texts, out, config)
    interactive = (files or ["-"]) == ["-"] and sys.stdin.isatty()
    if stream is None and not as_json and _can_stream(loaded, config):
        texts, first = _peek(texts, 0 if interactive else 2)
        stream = interactive or len(first) == 1
    if stream:
        return _print_streams(loaded, texts, config)
    for answers in loaded.answers(texts, config, attention, 1 if interactive else READ_AHEAD):
        _print_answers(answers, as_json)


def open_run(
    run: Path, device: str, parts: list[Path] | None, int8: bool = False, ensemble: list[Path] | None = None
) -> Any:
    """Load a run, or several as an ensemble."""
    from regard.tasks.load import load

    add_parts(parts)
    loaded = load([run, *(ensemble or [])], device, int8)
    if loaded.note:
        print(f"regard: {printable(loaded.note)}", file=sys.stderr)
    return loaded


def decode_config(loaded: Any, own: dict[str, Any], **given: Any) -> Any:
    """Return the decoding options. Options that the run does not support are refused; its `own` ones are set as
    attributes of it."""
    from regard.decode import DecodeConfig

    own, given = ({name: value for name, value in some.items() if value is not None} for some in (own, given))
    for name in (*own, *given):
        if name not in loaded.options:
            known = ", ".join(_flag(one) for one in loaded.options) or "none of this kind"
            raise UserError(f"this model has nothing to do with {_flag(name)}; its options: {known}")
    for name, value in own.items():
        if name not in ("attention", "stream", "out"):
            setattr(loaded, name, value)
    return DecodeConfig.read(given, loaded.config)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def read_texts(loaded: Any, files: Iterable[str]) -> Iterator[Any]:
    """Yield the inputs in some files: the text columns of a table like the one that the run was trained on, else the
    lines."""
    from regard.data.layout import layout_in
    from regard.data.layout import texts_of as table_texts
    from regard.runs.folder import read_run_json

    kind = getattr(loaded, "reads", "pairs") if loaded.pairs else "text"
    layout = layout_in(read_run_json(loaded.folder)) if loaded.folder else None
    for file in files:
        texts = None if file == "-" or not Path(file).stat().st_size else table_texts(Path(file), kind, layout)
        yield from read_lines([file]) if texts is None else texts


def read_lines(files: Iterable[str]) -> Iterator[str]:
    """Yield the lines of all files, without line ends."""
    for file in files:
        if file == "-":
            lines, name = sys.stdin.buffer, "standard input"
        else:
            lines, name = open(file, "rb"), file  # noqa: SIM115
        with lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield line.decode("utf-8").rstrip("\r\n")
                except UnicodeDecodeError:
                    raise UserError(f"{name}, line {number} is not UTF-8") from None


def _peek(texts: Iterator[str], count: int) -> tuple[Iterator[str], list[str]]:
    """Return an iterator over the same texts, and a list of the first ones."""
    first = list(islice(texts, count))
    return chain(first, texts), first


def _can_stream(loaded: Any, config: Any) -> bool:
    """Return whether the output is a terminal and the run can stream to it."""
    return (
        sys.stdout.isatty()
        and "stream" in loaded.options
        and not loaded.pairs
        and config.beam == 1
        and not config.speculate
    )


def _print_streams(loaded: Any, texts: Iterator[str], config: Any) -> None:
    for text in texts:
        for piece in loaded.stream(text, config):
            sys.stdout.write(_printable_answer(piece))
            sys.stdout.flush()
        sys.stdout.write("\n")


def _print_file_answers(loaded: Any, files: list[str], config: Any, as_json: bool) -> None:
    """Print the answers for files of which each is one input."""
    if not files or "-" in files:
        raise UserError(f"this model takes {loaded.takes}: name the files")
    for file, answers in zip(files, loaded.answers(loaded.read(files), config), strict=True):
        _print_answers(answers, as_json, file if as_json or len(files) > 1 else "", sure=loaded.takes == "images")


def _print_answers(answers: list[Any], as_json: bool, file: str = "", sure: bool = False) -> None:
    """Print answers. file: printed before each; sure: print the probability after each."""
    if as_json:
        values: Any = to_json(answers)
        dump({"file": file, "answers": values} if file else values, indent=None)
    else:
        for answer in answers:
            values = [file, answer.text] if file else [answer.text]
            typer.echo(_printable_answer("\t".join([*values, f"{math.exp(answer.logprob):.3f}"] if sure else values)))


def _printable_answer(answer: str) -> str:
    """Return an answer for printing: without control characters in a terminal, since a model can be made to generate
    them, and unchanged in a file."""
    return printable(answer) if sys.stdout.isatty() else answer.encode("utf-8", "replace").decode()


def to_json(values: Any) -> Any:
    """Return values for JSON: named tuples as dicts, without entries that are None."""
    if hasattr(values, "_asdict"):
        return {name: to_json(value) for name, value in values._asdict().items() if value is not None}
    return [to_json(one) for one in values] if isinstance(values, list | tuple) else values
