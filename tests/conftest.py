import torch

torch.set_num_threads(1)  # two workers share two cores
