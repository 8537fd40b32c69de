"""Operations from tensors to tensors. Each is defined in plain PyTorch; where dispatch.py finds a faster way for the
tensors at hand, that runs, and gives the same."""
