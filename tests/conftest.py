import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # those who wait for others leave the cores to them

import pytest
import torch

from regard.machine import tune
from regard.native import build

tune()  # as the command line does; test_guest.py tests what is without
torch.set_num_threads(1)  # two workers share two cores


@pytest.fixture(autouse=True)
def seeded():
    """What a test draws is the same every time."""
    torch.manual_seed(1)


@pytest.fixture(params=[1, 2])
def threads(request, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(build, "SMALL", 1)  # all work is for all cores
    yield request.param
    torch.set_num_threads(before)
