"""The XLA backend, through JAX. JAX itself is imported when the backend is first used."""

from torch_ltc.backends.xla.backend import XlaBackend

__all__ = ["XlaBackend"]
