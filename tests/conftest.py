import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # those who wait for others leave the cores to them

import torch  # noqa: E402

from regard.core.native import kernels  # noqa: E402

kernels()  # before torch multiplies in half precision: see there
torch.set_num_threads(1)  # two workers share two cores
