"""The seam to PyTorch: every private interface of PyTorch that the package uses or replaces."""
