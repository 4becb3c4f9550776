"""Measurements against eager PyTorch and the original Lazy Tensor Core; run with `python -m benchmarks.<name>`."""
