"""`regard predict`: a trained model at work on texts, pictures or recordings."""

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

HOW = "How to decode"
VECTORS = "Vectors of texts"
OTHER = "Pictures and recordings"
AHEAD = 4096  # texts that are read ahead, to work on those of equal length together

TheRun = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, as `regard train` leaves it.")]
Beam = Annotated[int | None, typer.Option(rich_help_panel=HOW, help="Hypotheses of beam search; 1 for greedy search.")]
LengthPenalty = Annotated[float | None, typer.Option(rich_help_panel=HOW, help="Exponent of the length.")]
EarlyStopping = Annotated[
    str | None,
    typer.Option(
        metavar="full|heuristic|never",
        rich_help_panel=HOW,
        help="When beam search ends: full, once as many hypotheses as the beam have ended; heuristic, once no open one "
        "is more probable than those; never, once nothing better is possible.",
    ),
]
MaxNewTokens = Annotated[int | None, typer.Option(rich_help_panel=HOW, help="The most tokens of an answer.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, mps, ...")]
Int8 = Annotated[bool, typer.Option("--int8", help="8-bit weights: faster on a CPU, less exact.")]

Ensemble = Annotated[
    list[Path] | None,
    typer.Option("--ensemble", metavar="RUN", help="Another run whose probabilities are averaged in; repeatable."),
]
Shortlist = Annotated[
    bool, typer.Option("--shortlist", help="Score likely words alone, by the list that 'regard shortlist' made.")
]


@app.command()
def predict(
    run: TheRun,
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="Texts, one a line; - for standard input. Or pictures, or recordings."),
    ] = None,
    beam: Beam = None,
    length_penalty: LengthPenalty = None,
    early_stopping: EarlyStopping = None,
    num_return: Annotated[int | None, typer.Option(rich_help_panel=HOW, help="Answers for each input.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=HOW,
            help="Above 0: sample; 0: greedy. A language model trained here that is told nothing samples with "
            "--temperature 0.8 --top-p 0.95 --seed 1.",
        ),
    ] = None,
    top_k: Annotated[int | None, typer.Option(rich_help_panel=HOW)] = None,
    top_p: Annotated[float | None, typer.Option(rich_help_panel=HOW)] = None,
    min_p: Annotated[float | None, typer.Option(rich_help_panel=HOW)] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(rich_help_panel=HOW, help="Above 1: discourage repeats.")
    ] = None,
    seed: Annotated[int | None, typer.Option(rich_help_panel=HOW, help="Seed of sampling.")] = None,
    max_new_tokens: MaxNewTokens = None,
    speculate: Annotated[
        int | None, typer.Option(rich_help_panel=HOW, help="Tokens drafted at a time: faster, and the same answers.")
    ] = None,
    draft_model: Annotated[
        Path | None, typer.Option(metavar="RUN", rich_help_panel=HOW, help="A smaller run that drafts tokens.")
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", rich_help_panel=HOW, help="Shorten inputs that are too long.")
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
        list[str] | None, typer.Option(rich_help_panel=OTHER, help="What a picture may show; several times.")
    ] = None,
    language: Annotated[str | None, typer.Option(rich_help_panel=OTHER, help="That is spoken: en, de, ...")] = None,
    task: Annotated[str | None, typer.Option(metavar="transcribe|translate", rich_help_panel=OTHER)] = None,
    timestamps: Annotated[bool, typer.Option("--timestamps", rich_help_panel=OTHER, help="Tell the times.")] = False,
    attention: Annotated[
        bool, typer.Option("--attention", help="With --json: the cross-attention of every answer.")
    ] = False,
    stream: Annotated[bool | None, typer.Option("--stream/--no-stream", help="Write the answer as it comes.")] = None,
    shortlist: Shortlist = False,
    ensemble: Ensemble = None,
    device: Device = "cpu",
    threads: Threads = 0,
    int8: Int8 = False,
    parts: Parts = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines with scores, all answers, alignments.")] = False,
) -> None:
    """Answer texts: translate, go on with a prompt, fill [MASK], label, embed; label pictures, write down speech."""
    if as_json and (stream or out):
        raise UserError("--json writes whole answers: leave out --stream and --out")
    if attention and not as_json:
        raise UserError("--attention writes matrices: say --json as well")
    for file in files or []:
        if file != "-" and not Path(file).is_file():
            raise UserError(f"there is no file '{file}' to read from")
    from regard.tasks.embed import Embedder

    loaded = opened(run, device, parts, int8, ensemble)
    of_vectors = {"pool": pool, "normalize": normalize, "similarity": similarity or None, "out": out}
    if embed or any(value is not None for value in of_vectors.values()):
        loaded = Embedder.of(loaded)
    own = {**of_vectors, "text": text or None, "language": language, "task": task, "timestamps": timestamps or None,
           "attention": attention or None, "stream": stream or None, "draft_model": draft_model}  # fmt: skip
    speculate = 4 if draft_model is not None and speculate is None else speculate
    if stream and speculate:
        raise UserError(
            "--speculate accepts several tokens at a time, and --stream prints them one by one: leave one out"
        )
    config = decode_config(
        loaded, own, beam=beam, length_penalty=length_penalty, early_stopping=early_stopping, num_return=num_return,
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        seed=seed, max_new_tokens=max_new_tokens, truncate=truncate or None, speculate=speculate,
        shortlist=shortlist or None,
    )  # fmt: skip
    if seed is not None and not config.samples:
        raise UserError("--seed is for answers that are drawn at random: say --temperature as well, such as 0.8")
    if loaded.takes != "texts":
        return _tell_files(loaded, files or [], config, as_json)
    texts = lines_of(files or ["-"]) if isinstance(loaded, Embedder) else texts_of(loaded, files or ["-"])
    if out is not None:
        return loaded.save(texts, out, config)
    interactive = (files or ["-"]) == ["-"] and sys.stdin.isatty()
    if stream is None and not as_json and _can_stream(loaded, config):
        texts, first = _peeked(texts, 0 if interactive else 2)
        stream = interactive or len(first) == 1
    if stream:
        return _tell_streams(loaded, texts, config)
    for answers in loaded.answers(texts, config, attention, 1 if interactive else AHEAD):
        _tell(answers, as_json)


def opened(
    run: Path, device: str, parts: list[Path] | None, int8: bool = False, ensemble: list[Path] | None = None
) -> Any:
    """What answers with a run, or with several together."""
    from regard.tasks.load import load

    add_parts(parts)
    loaded = load([run, *(ensemble or [])], device, int8)
    if loaded.note:
        print(f"regard: {printable(loaded.note)}", file=sys.stderr)
    return loaded


def decode_config(loaded: Any, own: dict[str, Any], **given: Any) -> Any:
    """How answers are found. Options that the run does not know are refused; those of its `own` become attributes of
    it, under the same names."""
    from regard.decode import DecodeConfig

    own, given = ({name: value for name, value in some.items() if value is not None} for some in (own, given))
    for name in (*own, *given):
        if name not in loaded.options:
            known = ", ".join(_option(one) for one in loaded.options) or "none of this kind"
            raise UserError(f"this model has nothing to do with {_option(name)}; its options: {known}")
    for name, value in own.items():
        if name not in ("attention", "stream", "out"):
            setattr(loaded, name, value)
    return DecodeConfig.read(given, loaded.config)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def texts_of(loaded: Any, files: Iterable[str]) -> Iterator[Any]:
    """What a run is asked: of a table like the one that it was trained with the texts, without the answers beside them;
    of any other file the lines."""
    from regard.data.layout import layout_in
    from regard.data.layout import texts_of as of_table
    from regard.runs.folder import read_run_json

    kind = getattr(loaded, "reads", "pairs") if loaded.pairs else "text"
    layout = layout_in(read_run_json(loaded.folder)) if loaded.folder else None
    for file in files:
        texts = None if file == "-" or not Path(file).stat().st_size else of_table(Path(file), kind, layout)
        yield from lines_of([file]) if texts is None else texts


def lines_of(files: Iterable[str]) -> Iterator[str]:
    """Of all files, without their ends."""
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


def _peeked(texts: Iterator[str], count: int) -> tuple[Iterator[str], list[str]]:
    """The same texts, and the first of them."""
    first = list(islice(texts, count))
    return chain(first, texts), first


def _can_stream(loaded: Any, config: Any) -> bool:
    """Whether a person watches a prompt being continued."""
    return (
        sys.stdout.isatty()
        and "stream" in loaded.options
        and not loaded.pairs
        and config.beam == 1
        and not config.speculate
    )


def _tell_streams(loaded: Any, texts: Iterator[str], config: Any) -> None:
    for text in texts:
        for piece in loaded.stream(text, config):
            sys.stdout.write(_safe(piece))
            sys.stdout.flush()
        sys.stdout.write("\n")


def _tell_files(loaded: Any, files: list[str], config: Any, as_json: bool) -> None:
    """Each file is an input by itself."""
    if not files or "-" in files:
        raise UserError(f"this model takes {loaded.takes}: name the files")
    for file, answers in zip(files, loaded.answers(loaded.read(files), config), strict=True):
        _tell(answers, as_json, file if as_json or len(files) > 1 else "", sure=loaded.takes == "images")


def _tell(answers: list[Any], as_json: bool, file: str = "", sure: bool = False) -> None:
    """file: named before each answer; sure: how likely it is follows."""
    if as_json:
        told: Any = plain(answers)
        dump({"file": file, "answers": told} if file else told, indent=None)
    else:
        for answer in answers:
            told = [file, answer.text] if file else [answer.text]
            typer.echo(_safe("\t".join([*told, f"{math.exp(answer.logprob):.3f}"] if sure else told)))


def _safe(answer: str) -> str:
    """An answer as it is for a file, and without control characters for a terminal: a model can be made to say them."""
    return printable(answer) if sys.stdout.isatty() else answer.encode("utf-8", "replace").decode()


def plain(told: Any) -> Any:
    """As JSON has it: named tuples as tables, without what is None."""
    if hasattr(told, "_asdict"):
        return {name: plain(value) for name, value in told._asdict().items() if value is not None}
    return [plain(one) for one in told] if isinstance(told, list | tuple) else told
