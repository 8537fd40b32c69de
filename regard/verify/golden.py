"""Golden files: weights, inputs, outputs and gradients of an original implementation, and the comparison with ours.

A case builds a part from the config of a golden file, maps the weights, runs the part, and compares the outputs:

    def attn_dot(golden):
        attention = Attention(...)
        golden.load(attention, {"q.weight": lambda w: w("linear_in.weight")})
        y = attention(golden.input("query"), ...)
        return golden.compare({"attn_h": y})

    CASES = {"attn_dot": attn_dot}

docs/verifying.md explains where both are found, what the files contain, and how to write them for another system.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from regard.core import Context, Memory, Mixer, Model, build
from regard.core.stack import Stack
from regard.errors import UserError, short

from .laws import Finding

ROOT = Path(__file__).parent.parent.parent
TESTS = ROOT / "tests" if (ROOT / "pyproject.toml").is_file() else None  # of a checkout; an installed regard has none
HINT = "give --golden FOLDER or set REGARD_GOLDEN, for example to tests/golden of a checkout of regard"

GetTensor = Callable[[str], Tensor]
Case = Callable[["Golden"], list[Finding]]

_given: list[Path] = []  # folders of `use_folder`, of which the last is used


@contextmanager
def use_folder(folder: Path | None) -> Iterator[None]:
    """Inside, look for golden files in this folder; None: in the default one."""
    if folder is not None and not folder.is_dir():
        raise UserError(f"--golden: there is no folder '{short(folder)}'")
    _given.extend([] if folder is None else [folder])
    try:
        yield
    finally:
        if folder is not None:
            _given.pop()


def folder() -> Path | None:
    """Return the folder of golden files: that of `use_folder`, or that of REGARD_GOLDEN, or the checkout's
    tests/golden; None where regard is installed without a checkout."""
    if _given:
        return _given[-1]
    if named := os.environ.get("REGARD_GOLDEN"):
        if not Path(named).is_dir():
            raise UserError(f"REGARD_GOLDEN: there is no folder '{short(named)}'")
        return Path(named)
    return None if TESTS is None else TESTS / "golden"


def golden_files(system: str) -> list[Path]:
    where = folder()
    return [] if where is None else sorted(where.glob(f"{system}-*.safetensors"))


def cases() -> dict[str, Case]:
    """Return the cases by system: those next to the golden files, in the folder itself or in `parity` beside a folder
    named `golden`, and those of the checkout's tests/parity."""
    where, made = folder(), dict[str, Case]()
    places = [] if TESTS is None else [TESTS / "parity"]
    if where is not None:
        places += [where.parent / "parity", where] if where.name == "golden" else [where]
    for path in dict.fromkeys(path.resolve() for place in places for path in sorted(place.glob("[a-z]*.py"))):
        if path.stem.startswith("test_") or path.stem == "conftest":
            continue
        name = f"regard_parity_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            sys.modules[name] = module
        made |= sys.modules[name].CASES
    return made


def in_steps(layers: Stack | Mixer, x: Tensor, memory: Memory | None = None) -> Tensor:
    """Return the outputs of layers for x (batch, time, width) in steps of 1, 2, 3, ... positions."""
    batch, time = x.shape[:2]
    outputs, done = [], 0
    with torch.no_grad():
        state = layers.start(Context.begin(batch, 0, memory=memory), time)
        while done < time:
            new = x[:, done : done + len(outputs) + 1]
            y, state = layers.step(new, state, Context.after(torch.full((batch,), done), new.shape[1]))
            outputs.append(y)
            done += new.shape[1]
    return torch.cat(outputs, 1)


class Golden:
    """One golden file, and the weights and inputs loaded from it."""

    def __init__(self, path: Path):
        self.path = path
        self.system, _, self.variant = path.stem.rpartition("-")
        self.tensors = load_file(path)
        self.sidecar = json.loads(path.with_suffix(".json").read_text())
        self.config = self.sidecar["config"]
        self.loaded: list[tuple[nn.Parameter, Callable[[GetTensor], Tensor]]] = []
        self.inputs: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def weight(self, name: str) -> Tensor:
        """Return a weight by its original name, following tied names."""
        return self.tensors["w." + self.sidecar.get("tied", {}).get(name, name)]

    def output(self, name: str) -> Tensor:
        return self.tensors["out." + name]

    def extra(self, name: str) -> Tensor:
        return self.tensors["extra." + name]

    def input(self, name: str) -> Tensor:
        """Return an input. If the golden file holds its gradient, `compare` checks ours. uint8 inputs become bool."""
        if name not in self.inputs:
            value = self.tensors["in." + name]
            value = value.bool() if value.dtype == torch.uint8 else value
            if "grad.in." + name in self.tensors:
                value = value.clone().requires_grad_()
            self.inputs[name] = value
        return self.inputs[name]

    def load(self, module: nn.Module, names: dict[str, str | Callable[[GetTensor], Tensor]]) -> None:
        """Load parameters and buffers: our name -> the original name, or a function of the original tensors, such as
        lambda w: w("in_proj_weight")[:16]. The function is also applied to gradients, so it must be linear."""
        own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
        given = {id(own[name]) for name in names}  # shared parameters have several names
        missing = [n for n, parameter in module.named_parameters() if id(parameter) not in given]
        if missing:
            raise KeyError(f"{self.system}: no weights for {missing}")
        for name, source in names.items():
            take = source if callable(source) else (lambda w, source=source: w(source))
            value = take(self.weight)
            if own[name].shape != value.shape:
                raise ValueError(f"{self.system}: {name} is {tuple(own[name].shape)}, golden has {tuple(value.shape)}")
            with torch.no_grad():
                own[name].copy_(value)
            if isinstance(own[name], nn.Parameter):
                self.loaded.append((own[name], take))

    def convert(self, config: dict | None = None, names: Collection[str] | None = None) -> Model:
        """Return the model of a family that regard/convert supports, with the golden weights, converted by its
        rules."""
        from regard.convert.family import family_of

        config = self.config if config is None else config
        available = {n.removeprefix("w.") for n in self.tensors if n.startswith("w.")} if names is None else names
        family = family_of(config)
        full_config = family.complete(config | family.config_from_tensors(config, available))
        model = build(family.recipe(full_config))
        taken: dict[str, str | Callable[[GetTensor], Tensor]] = {}
        for rule in family.rules(full_config, available):
            for k, ours in enumerate(rule.ours):
                taken[ours] = lambda w, rule=rule, k=k: rule.split(w(rule.theirs))[k]
        self.load(model, taken)
        return model.eval()

    def compare(self, outputs: dict[str, Tensor], gradients: bool = True) -> list[Finding]:
        """Compare our outputs with the original ones, then the gradients of weights and inputs for the golden
        cotangents."""
        rounding = self.sidecar.get("f32_vs_f64_maxabs")
        rounding = rounding if isinstance(rounding, dict) else {}  # some originals have only float32
        worst_rounding = max((v for v in rounding.values() if v is not None), default=0.0)
        findings = []
        for name, ours in outputs.items():
            want = self.output(name)
            if want.dtype == torch.uint8 or not want.is_floating_point():
                want, ours = want.double(), ours.double()
            findings.append(self._finding(f"out {name}", ours, want, rounding.get(name) or 0.0))
        if not gradients or not self.sidecar["gradients"]["have"]:
            return findings
        missing = [n for n in self.tensors if n.startswith("in.cot.") and n.removeprefix("in.cot.") not in outputs]
        if missing:
            raise KeyError(f"{self.system}: the gradient needs all outputs, and {missing} are not compared")
        loss = sum((ours * self.tensors["in.cot." + n]).sum() for n, ours in outputs.items() if "in.cot." + n in self)
        assert isinstance(loss, Tensor)
        loss.backward()
        used: set[str] = set()

        def grad(name: str) -> Tensor:
            name = self.sidecar.get("tied", {}).get(name, name)
            used.add(name)
            found = self.tensors.get("grad." + name)
            return torch.zeros_like(self.weight(name)) if found is None else found

        for parameter, take in self.loaded:
            want = take(grad)
            ours = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            findings.append(self._finding(f"grad {' '.join(sorted(used))[-60:]}", ours, want, worst_rounding))
        for name, value in self.inputs.items():
            if value.requires_grad:
                used.add("in." + name)
                findings.append(
                    self._finding(f"grad in.{name}", value.grad, self.tensors["grad.in." + name], worst_rounding)
                )
        unused = {n.removeprefix("grad.") for n in self.tensors if n.startswith("grad.")} - used
        if unused:
            raise KeyError(f"{self.system}: these gradients were not compared: {sorted(unused)}")
        return findings

    def _finding(self, what: str, ours: Tensor | None, want: Tensor, rounding: float) -> Finding:
        if ours is None or ours.shape != want.shape:
            shape = None if ours is None else tuple(ours.shape)
            raise ValueError(f"{self.path.name} {what}: ours is {shape}, the original's {tuple(want.shape)}")
        gap = (ours.detach() - want).abs()
        worst = float(gap.max()) if bool(torch.isfinite(gap).all()) else float("inf")
        scale = max(1.0, float(want.abs().max()))
        return Finding(f"{self.system}-{self.variant} {what}", worst, max(1e-5 * scale, 10 * rounding))
