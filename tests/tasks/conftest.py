"""What the tests of all tasks share."""

import os

import pytest


@pytest.fixture(autouse=True)
def _no_waiting_for_disks(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)
