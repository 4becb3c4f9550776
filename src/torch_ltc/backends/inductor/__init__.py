"""The Inductor backend: programs through PyTorch's own compiler, for cpu and cuda."""

from torch_ltc.backends.inductor.backend import InductorBackend

__all__ = ["InductorBackend"]
