"""Where PyTorch meets the runtime: the device, its kernels, copies, views, fallbacks, serialization."""
