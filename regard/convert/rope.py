"""Convert the rotary entries of config.json to arguments of the position `rotary`, and back. Older configs have
`rope_theta` and a table `rope_scaling`, newer ones a table `rope_parameters`."""

from __future__ import annotations

import math
from typing import Any

from regard.core import UserError
from regard.errors import nearest

SCALINGS = {  # kind: their entry -> ours
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor", "low_freq_factor": "low", "high_freq_factor": "high",
        "original_max_position_embeddings": "original",
    },
    "yarn": {
        "factor": "factor", "beta_fast": "fast", "beta_slow": "slow", "attention_factor": "attention",
        "truncate": "whole", "original_max_position_embeddings": "original",
    },
}  # fmt: skip


def read(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Return base and scaling. The dynamic kind changes with the sequence length in transformers, and here does not
    (see `rotary`): both agree up to max_position_embeddings."""
    table = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(table, dict) or any(isinstance(value, dict) for value in table.values()):
        raise UserError(f"config.json has the rotary table {table!r}; regard reads one table for all layers")
    base = table.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = table.get("rope_type") or table.get("type") or "default"
    if (table.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1:
        raise UserError("config.json says partial_rotary_factor, and regard reads this family only without it")
    if kind == "default":
        return base, None
    if kind not in SCALINGS:
        known = ("default", *SCALINGS)
        raise UserError(f"config.json scales rotary positions by '{kind}'; regard reads {', '.join(known)}"
                        f"{nearest(str(kind), known)}")  # fmt: skip
    longest = config["max_position_embeddings"]
    names = SCALINGS[kind]
    scaling: dict[str, Any] = {ours: table[name] for name, ours in names.items() if table.get(name) is not None}
    scaling = {"kind": kind} | scaling
    if kind == "dynamic":
        scaling |= {"original": longest, "length": longest}
    if "original" in names.values():
        scaling["original"] = config.get("original_max_position_embeddings") or scaling.get("original") or longest
    if kind == "yarn":
        scaling.setdefault("factor", longest / scaling["original"])
        one, two = table.get("mscale"), table.get("mscale_all_dim")
        if "attention" not in scaling and one and two:
            scaling["attention"] = _strength(scaling["factor"], one) / _strength(scaling["factor"], two)
    if "factor" not in scaling:
        raise UserError(f"config.json scales rotary positions by '{kind}' and does not say by which factor")
    return base, scaling


def write(base: float, scaling: dict[str, Any] | None) -> dict[str, Any]:
    """Return the entries of config.json, in the older and the newer form, for readers of either."""
    if scaling is None:
        return {
            "rope_theta": base,
            "rope_scaling": None,
            "rope_parameters": {"rope_theta": base, "rope_type": "default"},
        }
    kind = scaling["kind"]
    if kind not in SCALINGS:
        raise UserError(f"a rotary scaling of kind '{kind}' cannot be exported; {', '.join(SCALINGS)} can")
    table = {"rope_type": kind}
    table |= {name: scaling[ours] for name, ours in SCALINGS[kind].items() if ours in scaling}
    config = {"rope_theta": base, "rope_scaling": table, "rope_parameters": {"rope_theta": base} | table}
    return config | ({"max_position_embeddings": scaling["original"]} if kind == "dynamic" else {})


def _strength(factor: float, by: float) -> float:
    return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0
