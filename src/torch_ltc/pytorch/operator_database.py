"""PyTorch's databases of operators and modules, with inputs for them. A file of its own: it loads for seconds, and for
tests only."""

from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

__all__ = ["module_db", "op_db"]
