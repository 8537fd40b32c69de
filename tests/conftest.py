import torch

from regard.core.native import kernels

kernels()  # before torch multiplies in half precision: see there
torch.set_num_threads(1)  # two workers share two cores
