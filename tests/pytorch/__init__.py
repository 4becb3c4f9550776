"""PyTorch's own tests on the device: `make test-pytorch SOURCE=<a PyTorch source tree>`."""
