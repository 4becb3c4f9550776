"""Adapters to libraries beside PyTorch's core: `torch.compile`, export, Lightning, accelerate, notebooks."""
