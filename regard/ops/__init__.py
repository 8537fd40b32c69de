"""Operations from tensors to tensors. Each is defined in plain PyTorch; where dispatch.py finds a faster
implementation for the given tensors, that runs, with the same result."""
