"""Every golden file for which there is a case, outputs and gradients, against the original implementation."""

import pytest
import torch

from regard.verify import golden

CASES = golden.cases()
FILES = [path for system in sorted(CASES) for path in golden.golden_files(system)]


LIVE = {  # tests/convert compares these with transformers itself, so their numbers need not be carried
    "bert", "bloom", "clip", "gpt2", "llama", "llama_mqa", "marian", "mpt", "mqa_bigcode", "roformer", "t5", "t5v11",
    "vit", "whisper",
}  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_parity(path):
    torch.manual_seed(0)
    one = golden.Golden(path)
    findings = CASES[one.system](one)
    assert findings, f"{path.name}: nothing was compared"
    wrong = [f for f in findings if not f.holds]
    assert not wrong, "\n".join(f"{f.law}: {f.worst:.2e} > {f.limit:.0e}" for f in wrong)


def test_every_case_has_a_golden():
    """A case without numbers tests nothing."""
    assert [system for system in CASES if not golden.golden_files(system) and system not in LIVE] == []
