import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # those who wait for others leave the cores to them

import pytest
import torch

from regard.machine import tune

tune()  # as the command line does; test_guest.py tests what is without
torch.set_num_threads(1)  # two workers share two cores


@pytest.fixture(autouse=True)
def seeded():
    """What a test draws is the same every time."""
    torch.manual_seed(1)
