"""The device as PyTorch sees it: registration, its kernels, copies, views, fallbacks, serialization."""
