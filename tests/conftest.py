import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # those who wait for others leave the cores to them

import pytest
import torch

from regard.native import load_kernels

load_kernels()  # before torch multiplies in half precision: see there
torch.set_num_threads(1)  # two workers share two cores


@pytest.fixture(autouse=True)
def seeded():
    """What a test draws is the same every time."""
    torch.manual_seed(1)
