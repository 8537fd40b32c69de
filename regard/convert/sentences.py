"""Read and write the files by which sentence-transformers pools a text into one vector: modules.json names the pooling
and whether the vector is normalized."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from regard.core import UserError
from regard.errors import short
from regard.files.paths import named_path
from regard.files.reading import Natural, read_json

Table = dict[str, Any]
POOLS = {"cls_token": "first", "mean_tokens": "mean", "max_tokens": "max", "lasttoken": "last"}  # theirs -> ours
LENGTHS = "sentence_bert_config.json"


class Module(TypedDict):
    """An entry of modules.json."""

    type: str
    path: str


class Lengths(TypedDict, total=False):
    """The contents of the file LENGTHS."""

    max_seq_length: Natural | None


def read(folder: Path) -> Table | None:
    """Return {pool, normalize, longest}; None where the folder is not one of sentence-transformers."""
    path = folder / "modules.json"
    if not path.is_file():
        return None
    kinds = _kinds(path)
    wanted = ["Transformer", "Pooling", "Normalize"]
    if list(kinds) not in (wanted, wanted[:2]):
        raise UserError(f"{short(path)} says {', '.join(kinds)}, and regard reads {', '.join(wanted)}, in this order")
    longest = read_json(folder / LENGTHS, Lengths).get("max_seq_length") if (folder / LENGTHS).is_file() else None
    pooling = named_path(folder, kinds["Pooling"])
    if pooling is None:
        raise UserError(f"{short(path)} names '{kinds['Pooling']}', which is not in this folder")
    return {"pool": _pool(pooling), "normalize": "Normalize" in kinds, "longest": longest}


def _kinds(path: Path) -> dict[str, str]:
    """Return the folder of each module by its kind, in order."""
    return {module["type"].rpartition(".")[2]: module["path"] for module in read_json(path, list[Module])}


def _pool(folder: Path) -> str:
    table = read_json(folder / "config.json")
    prefix = "pooling_mode_"
    chosen = [key.removeprefix(prefix) for key, on in table.items() if key.startswith(prefix) and on is True]
    if len(chosen) != 1 or chosen[0] not in POOLS:
        raise UserError(
            f"{short(folder)}/config.json pools by {', '.join(chosen) or 'nothing'}, and regard knows one of "
            f"{', '.join(POOLS)}"
        )
    return POOLS[chosen[0]]


def files(table: Table, width: int) -> dict[str, Any]:
    """Return the files to write, by name."""
    kinds = {"Transformer": "", "Pooling": "1_Pooling"} | ({"Normalize": "2_Normalize"} if table["normalize"] else {})
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds.items())
    ]
    pooling = {"word_embedding_dimension": width}
    pooling |= {f"pooling_mode_{theirs}": ours == table["pool"] for theirs, ours in POOLS.items()}
    made = {"modules.json": modules, "1_Pooling/config.json": pooling}
    longest = table.get("longest")
    return made | ({LENGTHS: {"max_seq_length": longest, "do_lower_case": False}} if longest else {})
