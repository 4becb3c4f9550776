"""PyTorch's database of operators and sample inputs. A file of its own: it loads for seconds, and for tests only."""

from torch.testing._internal.common_methods_invocations import op_db

__all__ = ["op_db"]
