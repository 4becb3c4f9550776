"""Lowering: the backend interface and registry, the functional form, passes, partitioning, serialization."""
